"""What a replay will compute, known before anything runs: updates, microbatches, test ids. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from regress.dump.coordinates import Coordinates
from regress.dump.trajectory import Trajectory
from regress.errors import ConfigError, reason
from regress.layout import BatchPlan, SampleKey, TokenFrame, TokenLayout, plan_microbatches


@dataclass(frozen=True)
class PlannedUpdate:
    """One optimizer update: its samples in canonical order, and the token layout of each microbatch."""

    step: int
    update: int | None
    frame: TokenFrame
    layouts: tuple[TokenLayout, ...]

    @property
    def where(self) -> str:
        """``step_000000``, or ``step_000000_update1`` in a step of several updates."""
        return Coordinates(self.step, update=self.update).stem


def frame_of(trajectories: Sequence[Trajectory]) -> TokenFrame:
    """The canonical frame of a step's samples."""
    keys: tuple[SampleKey, ...] = tuple(trajectory.key for trajectory in trajectories)
    return TokenFrame(keys, tuple(len(trajectory.tokens) for trajectory in trajectories))


def plan_replay(
    trajectories: Mapping[int, Sequence[Trajectory]], config: Mapping[str, Any], overrides: Mapping[str, Any]
) -> list[PlannedUpdate]:
    """The updates of a case under a variant.

    Args:
        trajectories: the recorded samples of each step.
        config: the case's configuration, nested.
        overrides: those of the variant, by dotted key.

    Raises:
        ConfigError: if a value of ``batching`` or ``trainer`` is none, or a sample exceeds the token budget.
    """
    batching, trainer = (section(config, overrides, name) for name in ("batching", "trainer"))
    try:
        plan = _batch_plan(batching)
        cuts = trainer.get("epochs", 1), trainer.get("mini_batch_size")
        return [
            _planned(step, update, frame, plan)
            for step, samples in sorted(trajectories.items())
            for update, frame in _updates(frame_of(samples), *cuts)
        ]
    except (TypeError, ValueError, ArithmeticError) as error:  # values that the engine would refuse, too
        raise ConfigError(
            f"batching={batching} with trainer={trainer} cannot be planned ({reason(error)}); correct the case or the "
            "variant"
        ) from None


def section(config: Mapping[str, Any], overrides: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A section of the configuration with the overrides laid over it."""
    given = {
        key.removeprefix(f"{name}."): value for key, value in overrides.items() if key.startswith(f"{name}.")
    }
    return {**(config.get(name) or {}), **given}


def _batch_plan(values: Mapping[str, Any]) -> BatchPlan:
    known = {spec.name for spec in fields(BatchPlan)}
    return BatchPlan(**{key: value for key, value in values.items() if key in known})


def _updates(frame: TokenFrame, epochs: int, size: int | None) -> Iterator[tuple[int | None, TokenFrame]]:
    """Update index (None where the step has one) and samples, as the trainer cuts them."""
    count = len(frame.samples)
    parts = [range(start, min(start + (size or count), count)) for start in range(0, count, size or count)]
    several = epochs * len(parts) > 1
    for index, part in enumerate(part for _ in range(epochs) for part in parts):
        yield (index if several else None), frame.select(part)


def _planned(step: int, update: int | None, frame: TokenFrame, plan: BatchPlan) -> PlannedUpdate:
    try:
        layouts = plan_microbatches(frame.lengths, plan)
    except ValueError as error:
        raise ConfigError(f"step {step} cannot be batched: {error}") from None
    return PlannedUpdate(step, update, frame, tuple(layouts))
