"""Cases whose values depend on the microbatches, and the variants that leave those as they are. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from regress.grpo.fields import ObjectiveFields
from regress.replay.plan import PlannedUpdate

Samples = frozenset[int]


def depends_on_microbatches(algorithm: Mapping[str, Any]) -> bool:
    """Return True if an objective has denominators or statistics of each microbatch.

    Args:
        algorithm: fields of the objective that are not left to their defaults.
    """
    known = ObjectiveFields.__dataclass_fields__
    objective = ObjectiveFields(**{key: value for key, value in algorithm.items() if key in known})
    entropies = objective.has_entropy_term and objective.entropy_aggregation == "token-mean"
    return (
        objective.denominator_scope != "global"
        or (entropies and objective.entropy_scope == "microbatch")
        or (objective.aggregation == "seq-mean-token-sum-norm" and objective.norm_rule == "longest")
        or (objective.compares_tokens and objective.statistics_scope == "microbatch")
    )


def depends_on_ranks(algorithm: Mapping[str, Any]) -> bool:
    """Return True if a loss is the mean over data-parallel ranks of sums over their microbatches."""
    return algorithm.get("denominator_scope") == "microbatch_sum"


def same_microbatches(one: Sequence[PlannedUpdate], other: Sequence[PlannedUpdate]) -> bool:
    """Return True if the microbatches of all ranks together hold the same samples in both plans of a case."""
    return [_parts(update) for update in one] == [_parts(update) for update in other]


def _parts(update: PlannedUpdate) -> set[Samples]:
    """Return the samples of each microbatch."""
    layouts = (layout for own in update.layouts for layout in own)
    parts = {frozenset(segment.sample for segment in layout.whole.segments) for layout in layouts}
    return parts - {frozenset()}
