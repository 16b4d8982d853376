"""Bugs that no older golden case could show, each caught by the case or variant that is there for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from regress.engine import grpo_trainer, reference_policy
from regress.engine import optimizer as optim
from regress.engine.run_construction import Run
from regress.golden.golden_directory import GoldenStore
from regress.grpo import (
    advantage_computation,
    advantage_estimators,
    loss_aggregation,
    policy_losses,
    selective_log_softmax,
    token_losses,
    token_selection,
)
from regress.grpo.fields import ObjectiveFields
from tests.regression.conftest import GOLDEN, Judged

Patch = pytest.MonkeyPatch
Prepare = Callable[[Run], None] | None


def with_fields(patch: Patch, module: Any, name: str, **fields: Any) -> None:
    """Let a function see an objective with other fields."""
    right = getattr(module, name)

    def wrong(*args: Any, **named: Any) -> Any:
        changed = [replace(one, **fields) if isinstance(one, ObjectiveFields) else one for one in args]
        return right(*changed, **named)

    patch.setattr(module, name, wrong)


def one_temperature_for_both_signs(patch: Patch) -> None:
    with_fields(patch, policy_losses, "sapo", sapo_tau_neg=1.5)


def decay_of_the_other_sign(patch: Patch) -> None:
    with_fields(patch, policy_losses, "vespo_weight", vespo_lambda_neg=2.5)


def weights_of_samples_added_up(patch: Patch) -> None:
    with_fields(patch, policy_losses, "vespo_weight", sampler_correction="token_truncate")


def clipped_on_both_sides(patch: Patch) -> None:
    def wrong(t: policy_losses.PolicyInputs, o: ObjectiveFields) -> Tensor:
        clipped = t.log_ratio.clamp(-o.clip_low, o.clip_high)
        return -t.samples.mean(t.advantages) * torch.exp(t.samples.mean(clipped))

    patch.setattr(policy_losses, "geo_mean", wrong)


def every_token_trusted(patch: Patch) -> None:
    patch.setattr(policy_losses, "trusted", lambda t, o: torch.ones_like(t.ratio))


def square_not_halved(patch: Patch) -> None:
    with_fields(patch, policy_losses, "dro", dro_beta=1.0)


def no_token_drawn(patch: Patch) -> None:
    patch.setattr(
        token_selection, "drawn_by_covariance", lambda t, o: torch.zeros(len(t.log_probs), dtype=torch.bool)
    )


def least_covariances(patch: Patch) -> None:
    right = token_selection.covariances
    patch.setattr(token_selection, "covariances", lambda tokens: -right(tokens))


def mean_of_equal_rewards(patch: Patch) -> None:
    patch.setattr(advantage_estimators, "_centred", lambda samples: samples.rewards - samples.group.mean)


def groups_of_equal_prompts(patch: Patch) -> None:
    right = grpo_trainer.Trainer._advantages

    def wrong(self: Any, trajectories: Any, minis: Any) -> Tensor:
        by_prompt = [replace(t, group_id=str(t.tokens[: t.prompt_length])) for t in trajectories]
        return right(self, by_prompt, minis)

    patch.setattr(grpo_trainer.Trainer, "_advantages", wrong)


def reference_that_stays(patch: Patch) -> None:
    patch.setattr(reference_policy.Reference, "after_step", lambda self, step: None)


def rate_without_decay(patch: Patch) -> None:
    right = optim.build_scheduler
    patch.setattr(
        "regress.engine.run_construction.build_scheduler",
        lambda optimizer, config, **rest: right(optimizer, replace(config, lr_scheduler="constant"), **rest),
    )


def reference_without_temperature(patch: Patch) -> Prepare:
    def prepare(run: Run) -> None:
        assert run.trainer.reference is not None
        run.trainer.reference._policy.temperature = 1.0

    return prepare


def moments_in_single_precision(patch: Patch) -> Prepare:
    def prepare(run: Run) -> None:
        for state in run.trainer.optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].copy_(state[name].float())

    return prepare


def kl_without_the_ratio(patch: Patch) -> None:
    with_fields(patch, token_losses, "_kl", kl_bias_correction=False)


def denominators_of_the_mini_batch(patch: Patch) -> None:
    with_fields(patch, grpo_trainer, "weigh", denominator_scope="global")


def entropies_of_the_mini_batch(patch: Patch) -> None:
    with_fields(patch, grpo_trainer, "entropy_weights", entropy_scope="global")


def reward_without_kl(patch: Patch) -> None:
    right = grpo_trainer._penalty
    patch.setattr(grpo_trainer, "_penalty", lambda tokens, objective: 0.0 * right(tokens, objective))


def returns_without_discount(patch: Patch) -> None:
    right = advantage_computation.returns_of
    patch.setattr(
        advantage_computation, "returns_of", lambda rewards, seq, gamma, n: right(rewards, seq, 1.0, n)
    )


def longest_for_greatest_length(patch: Patch) -> None:
    right = grpo_trainer.weigh

    def wrong(*args: Any, completion_lengths: Any, **named: Any) -> Tensor:
        named["max_completion_length"] = max(completion_lengths)
        return right(*args, completion_lengths=completion_lengths, **named)

    patch.setattr(grpo_trainer, "weigh", wrong)


def lone_sample_without_advantage(patch: Patch) -> None:
    with_fields(patch, advantage_estimators, "_alone", single_sample="zero")


def empty_rows_counted(patch: Patch) -> None:
    with_fields(patch, loss_aggregation, "token_weights", count_empty_rows=True)


def baseline_without_lengths(patch: Patch) -> None:
    patch.setattr(advantage_estimators, "opo", advantage_estimators.group_mean)


def one_for_alpha(patch: Patch) -> None:
    mean = advantage_estimators.group_mean
    patch.setattr(advantage_estimators, "gpg", lambda samples, o: mean(samples, o) / o.gpg_norm)


def baseline_of_the_group(patch: Patch) -> None:
    patch.setattr(advantage_estimators, "grpo_passk", advantage_estimators.grpo)


def first_piece_alone(patch: Patch) -> None:
    """A softmax over the first piece of the vocabulary."""
    right = selective_log_softmax.online_softmax

    def wrong(block: Tensor, temperature: float, chunk: int, *rest: Any) -> Any:
        return right(block[:, :chunk], temperature, chunk, *rest)

    patch.setattr(selective_log_softmax, "online_softmax", wrong)


@dataclass(frozen=True)
class Signal:
    """A bug, the case (and variant) that has the signal, and the quantity that it breaks first."""

    inject: Callable[[Patch], Prepare]
    case: str
    first: str
    variant: str = "base"


SIGNALS = [
    Signal(mean_of_equal_rewards, "on_policy", "advantages"),
    Signal(groups_of_equal_prompts, "on_policy", "advantages"),
    Signal(moments_in_single_precision, "on_policy", "optimizer"),
    Signal(reference_that_stays, "cispo_kl", "advantages"),
    Signal(rate_without_decay, "cispo_kl", "param"),
    Signal(empty_rows_counted, "cispo_kl", "weights"),
    Signal(reference_without_temperature, "trl", "ref_log_probs"),
    Signal(kl_without_the_ratio, "trl", "token_gradient"),
    Signal(denominators_of_the_mini_batch, "trl", "weights"),
    Signal(entropies_of_the_mini_batch, "trl", "entropy_loss"),
    Signal(lone_sample_without_advantage, "trl", "advantages"),
    Signal(reward_without_kl, "rloo", "advantages"),
    Signal(returns_without_discount, "reinforce_plus_plus", "advantages"),
    Signal(one_temperature_for_both_signs, "sapo", "policy_loss"),
    Signal(baseline_without_lengths, "sapo", "advantages"),
    Signal(decay_of_the_other_sign, "vespo", "policy_loss"),
    Signal(weights_of_samples_added_up, "vespo", "policy_loss"),
    Signal(one_for_alpha, "vespo", "advantages"),
    Signal(clipped_on_both_sides, "geo_mean", "policy_loss"),
    Signal(baseline_of_the_group, "geo_mean", "advantages"),
    Signal(every_token_trusted, "dppo_tv", "policy_loss"),
    Signal(every_token_trusted, "dppo_kl", "metrics"),
    Signal(square_not_halved, "dro", "policy_loss"),
    Signal(no_token_drawn, "clip_cov", "policy_loss"),
    Signal(least_covariances, "kl_cov", "policy_loss"),
    Signal(longest_for_greatest_length, "kl_cov", "weights"),
    Signal(first_piece_alone, "dr_grpo", "log_probs", "vocab8"),
]
"""The first two by default, the others by ``--extended``."""

OLDER = ("cispo", "dapo", "dense", "dr_grpo", "gspo", "gpt2", "lora", "moe", "tied", "tools")


def name_of(signal: Signal) -> str:
    return f"{signal.case}-{signal.inject.__name__}"


EACH = [
    pytest.param(signal, id=name_of(signal), marks=[pytest.mark.extended] if index > 1 else [])
    for index, signal in enumerate(SIGNALS)
]


@pytest.mark.parametrize("signal", EACH)
def test_a_case_has_the_signal(signal: Signal, judge: Callable[..., Judged], monkeypatch: Patch) -> None:
    prepare = signal.inject(monkeypatch)
    found = judge(signal.case, signal.variant, prepare=prepare)
    assert found.failed
    assert found.first.quantity == signal.first


@pytest.mark.extended
@pytest.mark.parametrize("signal", SIGNALS, ids=name_of)
def test_no_older_case_has_it(signal: Signal, judge: Callable[..., Judged], monkeypatch: Patch) -> None:
    if signal.inject is moments_in_single_precision:
        pytest.skip("older states hold numbers of single precision, which rounding leaves alone")
    names = [name for name in OLDER if name != signal.case]
    known = GoldenStore(GOLDEN).names()
    assert {*names} <= {*known}
    prepare = signal.inject(monkeypatch)
    shown = [
        name
        for name in names
        if (prepare is None or GoldenStore(GOLDEN).case(name).claims.count("kl"))
        and judge(name, "base", prepare=prepare).failed
    ]
    assert shown == []
