"""Updates of a policy that is one number for each loss token: what they change, and what is refused."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from regress.engine.engine_ranks import SingleProcess
from regress.engine.mini_batch import LossTokens
from regress.engine.optimizer import adamw
from regress.engine.training_passes import Part, _missed, accumulate
from regress.engine.training_step import step_outcome, train_step, update
from regress.errors import NotFinite, RegressError
from regress.grpo.argument_checks import InputError
from regress.grpo.selective_log_softmax import TokenLogProbs
from tests.unit.engine.one_number_each import (
    Numbers,
    expected,
    micros,
    objective,
    poisoned,
    tokens,
)

SETTINGS: dict[str, Any] = {"betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}


def test_an_update_is_that_of_torch() -> None:
    policy = Numbers()
    optimizer = adamw(policy.named_parameters(), 0.05, **SETTINGS)
    outcome = train_step(policy, optimizer, tokens(), micros(2), objective(), max_grad_norm=None)
    start = Numbers().theta
    loss, gradient, _ = expected(tokens(), objective(), start)
    start.grad = gradient
    torch.optim.AdamW([start], lr=0.05, **SETTINGS).step()
    torch.testing.assert_close(policy.theta, start, rtol=1e-13, atol=0)
    assert outcome.loss == pytest.approx(loss, rel=1e-13)
    assert outcome.grad_norm == pytest.approx(float(gradient.norm()), rel=1e-13)
    assert math.fsum(outcome.terms.values()) == pytest.approx(loss, rel=1e-13)
    assert set(outcome.terms) == {"policy", "kl", "entropy"}
    assert not outcome.skipped
    assert set(outcome.metrics) >= {"kl", "entropy", "policy_loss"}


def test_tokens_are_compared_by_this_process_alone_if_there_is_no_world() -> None:
    losses = [
        train_step(
            policy := Numbers(),
            adamw(policy.named_parameters(), 0.05),
            tokens(),
            micros(2),
            objective(top_entropy_quantile=0.5, entropy_coef=0.0),
            world=world,
            max_grad_norm=None,
        ).loss
        for world in (None, SingleProcess())
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_an_update_that_is_not_finite_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, given = poisoned("old_log_probs") if name == "loss" else (Numbers(), tokens())
    if name == "grad_norm":
        monkeypatch.setattr(policy, "clip_grad_norm", lambda limit: torch.tensor(math.inf))
    optimizer = adamw(policy.named_parameters(), 0.05)
    before = policy.theta.detach().clone()
    with pytest.raises(NotFinite):
        train_step(policy, optimizer, given, micros(1), objective(), max_grad_norm=None)
    outcome = train_step(
        policy, optimizer, given, micros(1), objective(), max_grad_norm=None, skip_nonfinite=True
    )
    assert outcome.skipped
    assert math.isnan(outcome.loss)
    assert (outcome.metrics, outcome.terms) == ({}, {})
    assert torch.equal(policy.theta, before)
    assert policy.theta.grad is None
    assert not optimizer.state[policy.theta]


@pytest.mark.parametrize("problem", [None, InputError("own")])
def test_a_recorder_that_failed_stops_the_update(problem: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regress.engine.training_step.failure", lambda: OSError("the disk is full"))
    words = "own" if problem else "the disk is full"
    with pytest.raises(RegressError, match=words):
        step_outcome(SingleProcess(), Part(problem=problem))
    policy = Numbers()
    accumulate(policy, tokens(), micros(4), objective())
    with pytest.raises(RegressError, match=words):
        update(policy, adamw(policy.named_parameters(), 0.1), Part(problem=problem), max_grad_norm=None)


def test_settled_passes_of_one_rank_are_its_own() -> None:
    part = accumulate(Numbers(), tokens(), micros(2), objective())
    outcome = step_outcome(SingleProcess(), part)
    assert (outcome.loss, outcome.terms, outcome.metrics) == (part.loss, part.terms, part.metrics)
    with pytest.raises(InputError, match="own"):
        step_outcome(SingleProcess(), Part(problem=InputError("own")))


@pytest.mark.parametrize(
    ("log_prob", "without_loss", "missed"),
    [(-1.0, 0.0, False), (-1.0, 1.0, True), (math.nan, 0.0, False), (math.nan, 1.0, True)],
)
def test_a_loss_is_missed_where_another_rank_of_the_samples_has_none(
    log_prob: float, without_loss: float, missed: bool
) -> None:
    """A rank that is alone without a loss needs not wait for others; see `Policy.sum_over_context_parallel`."""
    told: list[float] = []

    def total(own: Tensor) -> Tensor:
        told.append(own.item())
        return own + without_loss

    policy: Any = SimpleNamespace(sum_over_context_parallel=total)
    part = LossTokens(torch.zeros(1, dtype=torch.int64), 1)
    assert _missed(policy, TokenLogProbs(torch.tensor([log_prob]), None), part) is missed
    assert told == [float(math.isnan(log_prob))]
