"""Rows of an output projection that the loss does not depend on: apart, and without a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regress.engine.projection import _projected_apart


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
