"""Faults of the figures that a step reports over several ranks, where all that it computes is right."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from regress.engine import passes
from regress.engine.passes import Part, Share
from regress.grpo.metrics import Metric, add_metrics
from tests.faults.fault import fault
from tests.faults.metrics import changed
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import on_rank

BLIND = ("loss 5 %", "loss 1 %", "norm 3 %", "cosine 0.99", "L2 8.3 %", "allclose", "mean 1e-3")


@fault(
    names=r"training_step/entropy",
    category="U",
    fresh=True,
    first="metrics",
    source="TRL: an entropy that is logged behind the mask of high-entropy tokens",
    cases=("cispo_kl",),
    variants=("dp2",),
    rules=("reported",),  # names the tokens that it counts
    blind=BLIND,
)
def entropy_of_kept_tokens_for_all(patch: Patch) -> None:
    """Report the mean entropy of the tokens that masks leave as that of all."""
    changed(patch, lambda _, known: {"entropy": known["entropy/kept"]})


@fault(
    names=r"training_step/(policy_loss|kl|entropy|clip_ratio/.*|approx_kl/.*|ratio/.*)",
    category="U",
    fresh=True,
    first="metrics",
    source="a list of metrics that one rank clears behind its first microbatch",
    cases=("tools",),
    variants=("dp2-packed-budget48",),
    rules=("reported",),  # names how it is combined over microbatches and ranks
    blind=BLIND,
)
def first_microbatch_of_a_rank_not_reported(patch: Patch) -> None:
    """One rank counts the tokens of its first microbatch in no metric."""
    right: Any = passes._Losses.part

    def wrong(self: Any, shares: Sequence[Share]) -> Part:
        found: Part = right(self, shares)
        if not on_rank(1):
            return found
        none: dict[str, Metric] = {}
        later = functools.reduce(add_metrics, (share.metrics for share in shares[1:]), none)
        return replace(found, metrics=later)

    patch.setattr(passes._Losses, "part", wrong)
