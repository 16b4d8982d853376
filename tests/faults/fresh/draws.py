"""Faults of the distribution that a sampler draws from: in a later turn, on one rank, and in the order of its cuts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from regress.engine.rollout import HFRolloutWorker, SampledRollouts
from regress.engine.sampling import Completion, SamplingParams
from tests.faults.fault import fault
from tests.faults.fresh.sampling import warped
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import on_rank

DISTRIBUTION = ("sampler-distribution", "sampler")
"""Rules that name temperature, top-k, top-p and the greedy setting."""


@fault(
    category="V",
    fresh=True,
    cases=("rollout",),
    variants=("base",),
    first="trajectory",
    steps=None,
    source="vllm#42259: top-p and top-k in the other order",
    rules=DISTRIBUTION,
)
def nucleus_before_the_top_k(patch: Patch) -> None:
    """The nucleus is chosen among all tokens, and the most probable ones of it are left after that."""
    warped(patch, lambda _, found: sorted(found, key=lambda one: type(one).__name__ == "TopKLogitsWarper"))


@fault(
    category="V",
    fresh=True,
    cases=("rollout",),
    variants=("base",),
    first="trajectory",
    steps=None,
    source="a second request of a conversation that lacks the sampling parameters",
    rules=DISTRIBUTION,
)
def temperature_of_the_first_turn_alone(patch: Patch) -> None:
    """Completions behind an answer of the environment are drawn at temperature 1."""
    right: Any = SampledRollouts._turn

    def wrong(
        self: SampledRollouts,
        talks: Sequence[Any],
        rows: Sequence[int],
        params: SamplingParams,
        keys: Sequence[tuple[object, ...]],
    ) -> None:
        later = keys[0][-1] != 0
        right(self, talks, rows, replace(params, temperature=1.0) if later else params, keys)

    patch.setattr(SampledRollouts, "_turn", wrong)


@fault(
    category="V",
    fresh=True,
    cases=("rollout",),
    variants=("rollout-dp2-batch5",),
    first="trajectory",
    steps=None,
    source="lerobot#3668: a mode of evaluation that one rank keeps",
    rules=DISTRIBUTION,
)
def one_rank_samples_greedily(patch: Patch) -> None:
    """The second rank takes the most probable token in training, too."""
    right: Any = HFRolloutWorker.complete

    def wrong(self: HFRolloutWorker, prompts: Any, params: SamplingParams, *rest: Any) -> list[Completion]:
        found: list[Completion] = right(
            self, prompts, replace(params, greedy=params.greedy or on_rank(1)), *rest
        )
        return found

    patch.setattr(HFRolloutWorker, "complete", wrong)
