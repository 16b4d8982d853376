"""Rows of an output projection that the loss does not depend on: apart, and without a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regress.engine.log_prob_projection import _projected_apart, chunked_log_probs, hidden_at, logits_at
from regress.grpo.selective_log_softmax import TokenLogProbs, token_log_probs


class Head(nn.Linear):
    """Head that counts the rows of each call."""

    def __init__(self) -> None:
        super().__init__(4, 6, bias=False, dtype=torch.float64)
        self.rows: list[tuple[int, bool]] = []

    def forward(self, rows: Tensor) -> Tensor:
        self.rows.append((rows.shape[1], torch.is_grad_enabled()))
        return super().forward(rows)


def hidden() -> Tensor:
    return torch.randn(1, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


COUNTED = torch.tensor([True, False, True, True, False])


def test_rows_that_do_not_count_are_projected_without_a_graph() -> None:
    head, rows = Head(), hidden().requires_grad_()
    with _projected_apart(head, COUNTED):
        logits = head(rows)
    assert head.rows == [(2, False), (3, True)]
    torch.testing.assert_close(logits, rows @ head.weight.T, rtol=1e-14, atol=0)
    logits.sum().backward()
    assert rows.grad is not None
    assert (rows.grad[0].abs().sum(1) > 0).tolist() == COUNTED.tolist()


@pytest.mark.parametrize("own", [False, True])
def test_the_forward_of_the_head_is_put_back(own: bool) -> None:
    head = Head()
    before = head.forward
    if own:
        head.forward = before  # type: ignore[method-assign]  # as a wrapper does
    with _projected_apart(head, COUNTED):
        assert head.forward != before
    assert vars(head).get("forward") == (before if own else None)
    head(hidden())
    assert head.rows == [(5, True)]


def test_a_split_input_is_projected_as_a_whole() -> None:
    class Split(Tensor):
        """Rows that lie on several ranks."""

    head = Head()
    rows: Any = hidden().as_subclass(Split)
    with _projected_apart(head, COUNTED):
        head(rows)
    assert head.rows == [(5, True)]


class Tiny(nn.Module):
    """Embeddings and a head."""

    dtype = torch.float64

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embeddings, self.head = nn.Embedding(7, 4, dtype=torch.float64), Head()

    def get_output_embeddings(self) -> Head:
        return self.head

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embeddings(tokens))
        return logits


TOKENS = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 1]])
INDEX = torch.tensor([6, 0, 3, 3, 5])


@pytest.mark.parametrize("counted", [None, torch.ones(5, dtype=torch.bool)])
def test_only_the_rows_that_are_asked_for_are_projected(counted: Tensor | None) -> None:
    model: Any = Tiny()
    whole = model(TOKENS).flatten(0, 1)[INDEX]
    model.head.rows.clear()
    with logits_at(model, INDEX, counted):
        logits = model(TOKENS)
    assert model.head.rows == [(5, True)]
    torch.testing.assert_close(logits, whole[None], rtol=1e-14, atol=0)
    model.head.rows.clear()
    with logits_at(model, INDEX, COUNTED):
        apart = model(TOKENS)
    assert model.head.rows == [(2, False), (3, True)]
    torch.testing.assert_close(apart, whole[None], rtol=1e-14, atol=0)


def test_hooks_of_the_head_meet_the_chosen_rows() -> None:
    model: Any = Tiny()
    seen: list[torch.Size] = []
    model.head.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape))
    with logits_at(model, INDEX):
        model(TOKENS)
    assert seen == [(1, 5, 4)]


def test_hidden_states_come_without_a_projection() -> None:
    model: Any = Tiny()
    with hidden_at(model, INDEX) as found:
        model(TOKENS)
    assert model.head.rows == [(0, True)]
    assert torch.equal(found[0], model.embeddings(TOKENS).flatten(0, 1)[INDEX][None])


@pytest.mark.parametrize("chunk", [1, 2, 5, 9])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("counted", [None, COUNTED, torch.ones(5, dtype=torch.bool)])
def test_chunks_change_no_log_prob(chunk: int, entropy: bool, counted: Tensor | None) -> None:
    def log_probs(logits: Tensor, targets: Tensor) -> TokenLogProbs:
        return token_log_probs(logits, targets, entropy=entropy)

    model: Any = Tiny()
    targets = torch.tensor([3, 0, 5, 2, 2])
    rows, plain = hidden().requires_grad_(), hidden().requires_grad_()
    found = chunked_log_probs(model, rows, targets, log_probs, chunk=chunk, counted=counted)
    assert max(count for count, _ in model.head.rows) <= chunk
    wanted = log_probs((plain @ model.head.weight.T)[0], targets)
    torch.testing.assert_close(found.log_probs, wanted.log_probs, rtol=1e-13, atol=1e-15)
    assert (found.entropy is None) == (not entropy)
    total, right = found.log_probs.sum(), wanted.log_probs
    mask = torch.ones(5, dtype=torch.bool) if counted is None else counted
    right_total = right[mask].sum()
    if found.entropy is not None and wanted.entropy is not None:
        torch.testing.assert_close(found.entropy, wanted.entropy, rtol=1e-12, atol=1e-14)
        total, right_total = total + 2 * found.entropy.sum(), right_total + 2 * wanted.entropy[mask].sum()
    (gradient,) = torch.autograd.grad(total, rows)
    (right_gradient,) = torch.autograd.grad(right_total, plain)
    torch.testing.assert_close(gradient, right_gradient, rtol=1e-12, atol=1e-15)
    with torch.no_grad():
        again = chunked_log_probs(model, rows, targets, log_probs, chunk=chunk, counted=counted)
    assert torch.equal(again.log_probs, found.log_probs)
