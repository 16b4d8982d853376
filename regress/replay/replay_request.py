"""One replay: a case under a variant in one precision. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from regress.golden.golden_case import GoldenCase
from regress.replay.case_reads import trajectories_of
from regress.replay.replay_plan import PlannedUpdate, plan_replay, world_size
from regress.replay.variant import Precision, Variant


@dataclass(frozen=True)
class Replay:
    """A case under a variant in one precision: runs once, however many tests use it."""

    case: GoldenCase
    variant: Variant
    precision: Precision

    @property
    def name(self) -> str:
        """Name as in test ids: ``case/variant``, with the precision unless it is float64."""
        return f"{self.case.name}/{self.variant.name}{self.precision.suffix}"

    @property
    def world_size(self) -> int:
        """Number of its ranks."""
        return max(world_size(self.case.config, overrides) for overrides in self.processes)

    @property
    def processes(self) -> tuple[Mapping[str, Any], ...]:
        """Overrides of each of the processes that make it one after the other."""
        variant = self.variant
        return (variant.overrides,) if variant.before is None else (variant.before, variant.overrides)

    @cached_property
    def plan(self) -> list[PlannedUpdate]:
        """Updates that it computes, and the microbatches of every rank."""
        rollouts, config = trajectories_of(self.case), self.case.config
        plans = [plan_replay(rollouts, config, overrides) for overrides in self.processes]
        return (
            [*plans[0][: self.variant.resume_at], *plans[-1][self.variant.resume_at :]]
            if plans[1:]
            else plans[0]
        )
