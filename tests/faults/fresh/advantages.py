"""Faults of one process on the way from rewards to advantages, and in coefficients and references that move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regress.dump.trajectory import Trajectory
from regress.engine import trainer
from regress.engine.reference import Reference
from regress.engine.trainer import Trainer
from regress.grpo import advantages
from regress.grpo.advantages import token_advantages
from regress.grpo.controllers import Coefficients
from regress.grpo.estimators import ESTIMATORS, Scored, group_mean
from regress.grpo.objective import Objective
from regress.grpo.returns import padded, positions
from regress.grpo.rewards import deviation
from tests.faults.fault import fault
from tests.faults.patch import Patch

ADVANTAGES = "advantages advantages"
BLIND = ("allclose", "mean 1e-3")


@fault(
    category="I",
    fresh=True,
    source="a clip of rewards that is configured and not applied",
    cases=("rloo",),
    variants=("base",),
    first=ADVANTAGES,
    rules=("advantage-penalty",),  # names the rewards
    blind=BLIND,
)
def bounds_of_rewards_left_out(patch: Patch) -> None:
    """Rewards enter the baseline as they are, whatever their bounds."""
    right: Any = token_advantages

    def wrong(
        rewards: Tensor, groups: Tensor, sequence: Tensor, o: Objective, *args: Any, **rest: Any
    ) -> Any:
        return right(rewards, groups, sequence, replace(o, reward_min=None, reward_max=None), *args, **rest)

    patch.setattr(trainer, "token_advantages", wrong)


@fault(
    category="I",
    fresh=True,
    source="GDPO: rewards that are summed before they are normalized",
    cases=("kl_cov",),
    variants=("base",),
    first=ADVANTAGES,
    rules=("advantage-scale", "advantage-groups"),
)
def rewards_summed_first(patch: Patch) -> None:
    """Rewards of several functions are summed and then normalized, not the other way round."""
    right: Any = token_advantages

    def wrong(
        rewards: Tensor, groups: Tensor, sequence: Tensor, o: Objective, *args: Any, **rest: Any
    ) -> Any:
        weights = torch.tensor(rest.pop("reward_weights"), dtype=rewards.dtype)
        changed = replace(
            o, reward_aggregation="sum_then_normalize", normalize_advantages=False, scale="group"
        )
        return right((rewards * weights).sum(1), groups, sequence, changed, *args, **rest)

    patch.setattr(trainer, "token_advantages", wrong)


@fault(
    category="I",
    fresh=True,
    source="TRL PR#5773",
    cases=("trl",),
    variants=("base",),
    first=ADVANTAGES,
    rules=(
        "one-sample",
        "advantage-groups",
    ),  # the last one names a group of one
)
def lone_sample_without_advantage(patch: Patch) -> None:
    """The only sample of a group has the advantage 0, and should have its reward."""
    right: Any = token_advantages

    def wrong(
        rewards: Tensor, groups: Tensor, sequence: Tensor, o: Objective, *args: Any, **rest: Any
    ) -> Any:
        return right(rewards, groups, sequence, replace(o, single_sample="zero"), *args, **rest)

    patch.setattr(trainer, "token_advantages", wrong)


@fault(
    category="I",
    fresh=True,
    source="verl: whitening with shift_mean=False",
    cases=("reinforce_plus_plus",),
    variants=("base",),
    first=ADVANTAGES,
    rules=("advantage-offset",),
)
def whitened_around_the_mean(patch: Patch) -> None:
    """Returns are divided by their deviation, and keep their mean."""

    def wrong(values: Tensor, objective: Objective) -> Tensor:
        return values * torch.rsqrt(deviation(values, objective.ddof).square() + objective.whiten_eps)

    patch.setattr(advantages, "whiten", wrong)


@fault(
    category="I",
    fresh=True,
    source="a discount that runs from the wrong end",
    cases=("reinforce_plus_plus",),
    variants=("base",),
    first=ADVANTAGES,
    rules=("advantage-penalty",),  # names the return of each token
)
def discounted_from_the_first_token(patch: Patch) -> None:
    """A return is discounted by the tokens before it, not by those between it and the reward."""

    def wrong(rewards: Tensor, sequence: Tensor, gamma: float, count: int) -> Tensor:
        position = positions(sequence, count)
        rows = padded(rewards, sequence, position, count)
        total = rows.flip(1).cumsum(1).flip(1)
        return total[sequence, position] * gamma ** position.to(rewards.dtype)

    patch.setattr(advantages, "returns_of", wrong)


@fault(
    category="I",
    fresh=True,
    source="OpenRLHF: the reward at the token before the end token",
    cases=("reinforce_plus_plus",),
    variants=("base",),
    first=ADVANTAGES,
    rules=("advantage-penalty",),  # names the token of the reward
)
def reward_one_token_early(patch: Patch) -> None:
    """The reward of a sample stands at its last token but one, and its last token earns nothing."""
    right: Any = advantages._Samples.token_rewards

    def wrong(self: Any) -> Tensor:
        found: Tensor = right(self)
        lengths = self._lengths
        rows = torch.nonzero(lengths > 1)[:, 0]
        last = lengths.cumsum(0)[rows] - 1
        reward = self._rewards.nan_to_num()[rows]
        found[last] -= reward
        found[last - 1] += reward
        return found

    patch.setattr(advantages._Samples, "token_rewards", wrong)


@fault(
    category="I",
    fresh=True,
    source="a baseline that forgets the lengths of samples",
    cases=("sapo",),
    variants=("base",),
    first=ADVANTAGES,
    rules=("advantage-groups",),  # names other weights of the samples of a group
)
def baseline_not_weighted_by_length(patch: Patch) -> None:
    """The baseline is the plain mean of the group, and should weigh rewards by the lengths of their samples."""

    def wrong(samples: Scored, objective: Objective) -> Tensor:
        return group_mean(samples, objective)

    known = dict(ESTIMATORS)
    patch.setattr(advantages, "ESTIMATORS", {**known, "opo": wrong})


@fault(
    category="I",
    fresh=True,
    source="NeMo-RL PR#2176: a key made of the prompt",
    cases=("on_policy",),
    variants=("base",),
    first=ADVANTAGES,
    rules=("advantage-groups",),
    blind=("mean 1e-3",),
)
def groups_by_the_text_of_the_prompt(patch: Patch) -> None:
    """A prompt that a step asks twice makes one group of both."""
    right: Any = Trainer._advantages

    def wrong(self: Trainer, trajectories: Sequence[Trajectory], minis: Any) -> Tensor:
        merged = [replace(one, group_id=str([*one.tokens][: one.prompt_length])) for one in trajectories]
        return right(self, merged, minis)

    patch.setattr(Trainer, "_advantages", wrong)


@fault(
    category="J",
    fresh=True,
    source="a controller that is made and never asked",
    cases=("cispo_kl",),
    variants=("base",),
    first=ADVANTAGES,
    steps=None,
    place="step1/rank0/micro0",
    rules=("advantage-penalty",),  # names the coefficient
    blind=BLIND,
)
def coefficient_of_the_divergence_not_adapted(patch: Patch) -> None:
    """The coefficient of the KL stays where it began."""
    patch.setattr(Coefficients, "after_rollout", lambda *_: None)


@fault(
    category="J",
    fresh=True,
    source="a controller that is made and never asked",
    cases=("dppo_tv",),
    variants=("base",),
    first="token_loss",
    steps=None,
    rules=("coefficient", "term-left-out", "term-not-computed"),
    blind=BLIND,
)
def coefficient_of_the_entropy_not_adapted(patch: Patch) -> None:
    """The controller of the entropy bonus never learns of an entropy, and rests."""
    patch.setattr(Coefficients, "after_update", lambda *_: None)


@fault(
    category="J",
    fresh=True,
    source="TRL: ref_model_mixup_alpha weighs the policy, not the reference",
    cases=("cispo_kl",),
    variants=("base",),
    first="ref_log_probs ref_log_probs",
    steps=None,
    place="step1/rank0/micro0",
    rules=(
        "reference",
        "advantage-penalty",
    ),  # the last one names the reference that the penalty compares
    blind=BLIND,
)
def mixture_from_the_other_end(patch: Patch) -> None:
    """The reference keeps the share that it should take from the policy."""
    right: Any = Reference.after_step

    def wrong(self: Reference, number: int) -> None:
        known = self._config
        self._config = replace(known, mixup_alpha=1.0 - known.mixup_alpha)
        try:
            right(self, number)
        finally:
            self._config = known

    patch.setattr(Reference, "after_step", wrong)


@fault(
    category="J",
    fresh=True,
    source="a callback at the begin of a step in place of its end",
    cases=("cispo_kl",),
    variants=("base",),
    first="ref_log_probs ref_log_probs",
    steps=None,
    place="step1/rank0/micro0",
    rules=(
        "reference",
        "advantage-penalty",
    ),  # the last one names the reference that the penalty compares
    blind=BLIND,
)
def reference_moved_before_the_updates(patch: Patch) -> None:
    """The reference moves towards the policy of before a step's updates, once its log-probs are known."""
    right: Any = Reference.after_step
    update: Any = Trainer._update

    def wrong(self: Trainer, work: Any, after: Any) -> None:
        if self.reference is not None:
            right(self.reference, 0)
        update(self, work, after)

    patch.setattr(Reference, "after_step", lambda *_: None)
    patch.setattr(Trainer, "_update", wrong)
