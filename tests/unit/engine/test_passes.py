"""Passes of a policy that is one number for each loss token: what adds up, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regress.engine.mini_batch import Microbatch, TokenBatch
from regress.engine.training_passes import _no_loss, accumulate, evaluate, sums
from regress.engine.training_step import weigh
from regress.errors import NotFinite, RegressError
from regress.grpo.objective_presets import make_objective
from regress.grpo.selective_log_softmax import TokenLogProbs
from regress.grpo.token_losses import TokenLoss, token_loss
from regress.layout import BatchPlan
from tests.unit.engine.one_number_each import (
    ADVANTAGES,
    BATCH,
    LENGTHS,
    WEIGHTS,
    K,
    Numbers,
    expected,
    micros,
    objective,
    poisoned,
    tokens,
)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("old", [True, False])
def test_microbatches_add_up(size: int, old: bool) -> None:
    given = tokens() if old else tokens(old_log_probs=None)
    policy, fields = Numbers(), objective()
    part = accumulate(policy, given, micros(size), fields)
    loss, gradient, terms = expected(given, fields, policy.theta)
    assert part.problem is None
    assert part.loss == pytest.approx(loss, rel=1e-13)
    assert policy.theta.grad is not None
    torch.testing.assert_close(policy.theta.grad, gradient, rtol=1e-13, atol=1e-15)
    assert terms.kl_K is not None
    assert terms.entropy_K is not None
    wanted = {
        "policy": float((WEIGHTS * terms.policy_K).sum()),
        "kl": 0.1 * float((WEIGHTS * terms.kl_K).sum()),
        "entropy": -0.02 * float((WEIGHTS * terms.entropy_K).sum()),
    }
    assert part.terms == pytest.approx(wanted, rel=1e-13)
    assert part.metrics["kl"].value == pytest.approx(float(terms.kl_K.mean()), rel=1e-13)
    assert part.metrics["kl"].count == K
    assert set(
        accumulate(Numbers(), given, micros(size), objective(entropy_coef=0.0, kl_coef=0.0)).terms
    ) == {"policy"}


def test_metrics_are_of_the_tokens_that_are_counted() -> None:
    """The training service has values of tokens outside of the loss, too."""
    counted = torch.arange(K) % 3 > 0
    policy, fields = Numbers(), objective()
    part = accumulate(policy, tokens(counted=counted), micros(2), fields)
    loss, _, terms = expected(tokens(), fields, policy.theta)
    assert part.loss == pytest.approx(loss, rel=1e-13)
    assert terms.kl_K is not None
    assert part.metrics["kl"].value == pytest.approx(float(terms.kl_K[counted].mean()), rel=1e-13)
    assert part.metrics["kl"].count == int(counted.sum()) < K


@pytest.mark.parametrize("missing", [False, True])
def test_losses_and_terms_that_are_given_back_hold_no_graph(missing: bool) -> None:
    shares: list[Any] = []

    class Kept(Numbers):
        def forward_backward(self, microbatches: Sequence[Microbatch], loss: Callable[..., Any]) -> list[Any]:
            shares.extend(super().forward_backward(microbatches, loss))
            return shares

    accumulate(Kept(missing=missing), tokens(), micros(2), objective())
    assert [share.loss.requires_grad for share in shares] == [False, False]
    assert [share.loss.grad_fn for share in shares] == [None, None]


def test_tokens_that_do_not_count_are_left_out() -> None:
    effective = [[1] * (2 + length) for length in LENGTHS]
    effective[2][-1] = 0
    whole = TokenBatch(BATCH.trajectories, effective=effective)
    policy = Numbers()
    part = accumulate(policy, tokens(), whole.microbatches(BatchPlan()), objective())
    _, _, terms = expected(tokens(), objective(), policy.theta)
    counted = torch.tensor([k != sum(LENGTHS[:3]) - 1 for k in range(K)])
    wanted = float((WEIGHTS * terms.loss_K.detach())[counted].sum())
    assert part.loss == pytest.approx(wanted, rel=1e-13)
    assert policy.theta.grad is not None
    assert [k for k, value in enumerate(policy.theta.grad.tolist()) if value == 0.0] == [sum(LENGTHS[:3]) - 1]


def named(seen: dict[str, Any]) -> Callable[..., TokenLoss]:
    def function(*args: Any, **values: Any) -> TokenLoss:
        seen.clear()
        seen.update(values)
        return token_loss(*args, **values)

    return function


def test_a_ratio_to_the_policy_itself_has_a_gradient() -> None:
    """The log-probs that stand for missing old ones are detached, also for a loss of one's own."""
    seen: list[bool] = []

    def function(log_probs: Tensor, old: Tensor, *args: Any, **values: Any) -> TokenLoss:
        seen.append(old.requires_grad)
        return token_loss(log_probs, old, *args, **values)

    accumulate(Numbers(), tokens(old_log_probs=None), micros(2), objective(), loss_function=function)
    assert seen == [False, False]


def test_samples_that_were_drawn_twice_weigh_twice() -> None:
    given, partition = tokens(), BATCH.partition(BatchPlan())
    counts = torch.tensor([2, 0, 1, 1])
    fields = make_objective(aggregation="token-sum")
    found = weigh(given, partition, fields, max_completion_length=9, counts=counts)
    assert found.tolist() == counts[BATCH.sequence].tolist()


def test_a_term_that_one_part_lacks_adds_nothing() -> None:
    assert sums([{"policy": 1.5, "kl": 0.25}, {"policy": 2.0}]) == {"policy": 3.5, "kl": 0.25}


@pytest.mark.parametrize("name", ["kept", "penalized"])
def test_a_loss_is_told_of_marks_only_where_there_are_some(name: str) -> None:
    seen: dict[str, Any] = {}
    accumulate(Numbers(), tokens(), micros(4), objective(), loss_function=named(seen))
    assert not {"marks", "entropy_scale_K", "correction_K"} & set(seen)
    marked = torch.arange(K) % 2 == 0
    accumulate(Numbers(), tokens(**{name: marked}), micros(4), objective(), loss_function=named(seen))
    assert getattr(seen["marks"], f"{name}_K").tolist() == marked.tolist()


def test_weights_and_corrections_take_the_dtype_of_the_loss() -> None:
    seen: dict[str, Any] = {}
    single = torch.full((K,), 1.1, dtype=torch.float32)
    given = tokens(correction=single, entropy_weights=2.0 * WEIGHTS)
    fields = objective(
        sampler_correction="token_truncate", correction_max=2.0, entropy_aggregation="token-mean"
    )
    accumulate(Numbers(), given, micros(4), fields, loss_function=named(seen))
    assert seen["correction_K"].dtype == torch.float64
    assert seen["entropy_scale_K"].tolist() == [2.0] * K
    small = Numbers()
    small.theta = nn.Parameter(small.theta.detach().float())
    old, ref = (getattr(tokens(), name).float() for name in ("old_log_probs", "ref_log_probs"))
    watched: list[Tensor] = []

    def watch(micro: Microbatch, out: TokenLogProbs, loss: TokenLoss) -> None:
        watched.append(loss.loss_K)

    narrow = tokens(old_log_probs=old, ref_log_probs=ref, advantages=ADVANTAGES.float())
    part = accumulate(small, narrow, micros(4), objective(), watch=watch)
    assert watched[0].dtype == torch.float32
    share = (WEIGHTS.float() * watched[0]).sum()
    assert part.loss == share.item()


@pytest.mark.parametrize("size", [1, 4])
def test_a_pass_without_gradients_has_the_same_loss(size: int) -> None:
    fields, policy = objective(entropy_coef=0.0), Numbers()
    part = evaluate(policy, tokens(), micros(size), fields)
    again = accumulate(Numbers(), tokens(), micros(size), fields)
    known = {
        name: metric for name, metric in again.metrics.items() if name != "entropy"
    }  # nobody gave entropies
    assert (part.loss, part.terms, part.metrics) == (again.loss, again.terms, known)
    assert policy.theta.grad is None
    seen: dict[str, Any] = {}
    evaluate(policy, tokens(), micros(size), fields, loss_function=named(seen))
    assert "ref_log_probs_K" in seen
    watched: list[Microbatch] = []
    evaluate(policy, tokens(), micros(size), fields, watch=lambda micro, out, loss: watched.append(micro))
    assert len(watched) == len(micros(size))
    silent = evaluate(Numbers(computes=False), tokens(), micros(size), fields)
    assert (silent.loss, silent.metrics, silent.terms, silent.problem) == (0.0, {}, {}, None)


@pytest.mark.parametrize("name", ["log_probs", "old_log_probs", "ref_log_probs"])
def test_values_that_are_not_finite_name_their_microbatch(name: str) -> None:
    policy, given = poisoned(name)
    part = accumulate(policy, given, micros(1), objective())
    assert isinstance(part.problem, NotFinite)
    assert str(part.problem).startswith("microbatch 2 (samples g/2) has no loss, so no update was made")
    assert policy.theta.grad is not None
    assert policy.theta.grad[-2] == 0.0 or name == "log_probs"


def test_a_loss_that_cannot_be_computed_is_no_matter_of_finite_values() -> None:
    part = accumulate(Numbers(), tokens(ref_log_probs=None), micros(2), objective())
    assert type(part.problem) is RegressError
    assert str(part.problem).startswith("microbatch 0 (samples g/0, g/1) has no loss")
    zero = [0.0, {}, {}]
    assert [part.loss, part.metrics, part.terms] == zero


def test_an_advantage_that_is_not_finite_is_an_error_of_its_kind() -> None:
    _, given = poisoned("advantages")
    part = accumulate(Numbers(), given, micros(1), objective())
    assert type(part.problem) is RegressError  # everything that the policy gave is finite


def test_a_loss_that_overflows_is_refused() -> None:
    def function(*args: Any, **values: Any) -> TokenLoss:
        found = token_loss(*args, **values)
        return found if found.loss_K.numel() != 4 else scaled(found, math.inf)

    part = accumulate(Numbers(), tokens(), micros(1), objective(), loss_function=function)
    assert isinstance(part.problem, NotFinite)
    assert str(part.problem).startswith("microbatch 2 (samples g/2) has the loss inf")
    assert math.isnan(part.loss)


def scaled(loss: TokenLoss, factor: float) -> TokenLoss:
    return TokenLoss(**{**vars(loss), "loss_K": loss.loss_K.abs() * factor})


def test_a_rank_has_no_loss_where_another_with_the_same_samples_has_none() -> None:
    part = accumulate(Numbers(missing=True), tokens(), micros(2), objective())
    assert (part.loss, part.metrics, part.terms, part.problem) == (0.0, {}, {}, None)


def test_a_rank_without_tokens_has_no_loss_but_a_graph() -> None:
    empty = torch.empty(0, dtype=torch.float64, requires_grad=True)
    share, _ = _no_loss(TokenLogProbs(empty, None))
    share.backward()
    assert (share.item(), empty.grad is not None) == (0.0, True)


def test_inputs_of_a_pass_without_gradients_are_recorded_under_their_microbatch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[int | None, tuple[Any, ...]]] = []
    where: list[int] = []

    @contextmanager
    def at(micro: int) -> Iterator[None]:
        where.append(micro)
        yield
        where.pop()

    def inputs(micro: Microbatch) -> None:
        seen.append((where[-1] if where else None, micro.sample_ids))

    monkeypatch.setattr("regress.engine.training_passes.at", at)
    monkeypatch.setattr("regress.engine.step_taps.inputs", inputs)
    evaluate(Numbers(), tokens(), micros(2), objective(entropy_coef=0.0))
    assert seen == [(0, (("g", 0), ("g", 1))), (1, (("g", 2), ("g", 3)))]
