"""Facts about an update of a case beside its golden values, for hypotheses; what costs time waits until one asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from regress.compare.diagnosis.related_values import OwnMicrobatch, RelatedValues
from regress.compare.dumps.golden_source import sampler_log_probs
from regress.compare.dumps.truth_source import Tensors
from regress.dump.numpy_arrays import Array
from regress.golden.golden_case import GoldenCase
from regress.replay.case_reads import trajectories_of
from regress.replay.replay_plan import PlannedUpdate

if TYPE_CHECKING:
    from regress.replay.sample_gradients import OwnGradients


@dataclass(frozen=True)
class _WhenAsked:
    """Samples' own gradients of an update, whose model needs torch and transformers."""

    case: GoldenCase
    update: PlannedUpdate
    before: str | None

    def __call__(self, name: str) -> NDArray[np.float64] | None:
        """Return the gradients of a parameter, ``[N, ...]``; None where they cannot be computed."""
        return self._computed(name)

    @cached_property
    def _computed(self) -> OwnGradients:
        from regress.replay.sample_gradients import OwnGradients

        return OwnGradients(self.case, self.update, self.before)


def related_values_of(
    case: GoldenCase,
    update: PlannedUpdate,
    before: str | None,
    after: str | None = None,
    *,
    own: bool = True,
) -> RelatedValues:
    """Return what is known of an update of a case besides its golden values.

    Args:
        before, after: names of the updates before it and after it, if there are any.
        own: True to compute its samples' own gradients where a hypothesis asks for them.
    """
    samples = trajectories_of(case)[update.step]
    return RelatedValues(
        rewards={sample.key: float(sample.reward) for sample in samples},
        sampler=sampler_log_probs(update.frame, samples),
        gradients=_WhenAsked(case, update, before) if own else None,
        microbatches=_microbatches(update),
        before={} if before is None else read_when_asked(case, before),
        after={} if after is None else read_when_asked(case, after),
    )


def _microbatches(update: PlannedUpdate) -> dict[str, OwnMicrobatch]:
    """Return the different microbatches of a plan, whose samples lie on some ranks, whole or in parts."""
    ranks: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for rank, own in enumerate(update.layouts):
        for number, place in enumerate(own):
            samples = tuple(sorted({segment.sample for segment in place.whole.segments}))
            if samples:
                ranks.setdefault((number, samples), []).append(rank)
    return {
        f"microbatch {number} of rank {holders[0]}": OwnMicrobatch(number, tuple(holders), np.array(samples))
        for (number, samples), holders in ranks.items()
    }


def read_when_asked(case: GoldenCase, where: str) -> dict[str, Mapping[str, Array]]:
    """Return the golden values of an update, each quantity read when it is first asked for."""

    def loader(quantity: str) -> Callable[[str], Array | None]:
        known = cache(lambda: case.truth_of(where, quantity))
        return lambda name: known()[name]

    manifest = case.manifest
    recorded = {} if manifest is None else manifest.truth[where]
    return {quantity: Tensors(entry.tensors, loader(quantity)) for quantity, entry in recorded.items()}
