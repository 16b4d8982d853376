"""Curriculum: stages of growing difficulty, left only by evaluations that are good enough.

An evaluation gives a pass rate after a number of rollout steps. It is counted once, and moves the curriculum by at most
one stage, which the next rollout samples from. After the last stage a new round begins at the first, with thresholds
that are higher by `increment`, until there were `max_rounds`; then the last stage stays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from regress.errors import TaskError
from regress.tasks.curriculum_stages import Stage, mean

SCHEMA_VERSION = 1
_DIGITS = 12  # of a pass rate and a threshold; 0.65 + 2 * 0.1 must be 0.85


@dataclass(frozen=True)
class CurriculumPosition:
    """Where a rollout stands: its stage from 0, its round from 1, and the step at which the stage was entered."""

    stage: int = 0
    round: int = 1
    start_step: int = 0


@dataclass(frozen=True)
class Rules:
    """Settings that all stages share.

    Attributes:
        max_rounds: rounds through all stages.
        increment: what every round adds to the thresholds.
        limit: highest threshold.
        window: latest evaluations of a stage whose mean is compared with the threshold.
    """

    max_rounds: int = 5
    increment: float = 0.1
    limit: float = 0.95
    window: int = 2


@dataclass(frozen=True)
class Evaluation:
    """An evaluation that was counted."""

    step: int
    performance: float
    stage: int
    round: int


@dataclass(frozen=True)
class Advancement:
    """A change of stage; performance and threshold are None where a recording says so and no evaluation."""

    step: int
    from_stage: int
    to_stage: int
    from_round: int
    to_round: int
    performance: float | None
    threshold: float | None


class Curriculum:
    """State of a curriculum.

    Args:
        stages: at least one.
        steps_per_pass: rollout steps that train once on every problem of each stage.
        rules: see `Rules`.
        recorded: True if a recording decides the stage of each step, and evaluations are only noted.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        steps_per_pass: Sequence[int],
        rules: Rules | None = None,
        *,
        recorded: bool = False,
    ) -> None:
        self.stages = tuple(stages)
        self.rules = rules or Rules()
        self.recorded = recorded
        self.place = CurriculumPosition()
        self.evaluations: list[Evaluation] = []
        self.advancements: list[Advancement] = []
        self._steps_per_pass = tuple(steps_per_pass)

    @property
    def stage(self) -> Stage:
        """The stage that the next rollout samples from."""
        return self.stages[self.place.stage]

    @property
    def threshold(self) -> float:
        """The pass rate that ends the stage in this round: the stage's own and `increment` for each earlier round."""
        raised = self.stage.threshold + self.rules.increment * (self.place.round - 1)
        return round(max(min(self.rules.limit, raised), self.stage.threshold), _DIGITS)

    @property
    def current(self) -> list[Evaluation]:
        """The evaluations since the stage was entered."""
        here = (self.place.stage, self.place.round)
        return [found for found in self.evaluations if (found.stage, found.round) == here]

    @property
    def performance(self) -> float | None:
        """The mean pass rate of the stage's latest evaluations; None before the first."""
        latest = [found.performance for found in self.current[-self.rules.window :]]
        return round(mean(latest), _DIGITS) if latest else None

    @property
    def steps_needed(self) -> int:
        """Rollout steps that the stage takes at least."""
        passing = self._steps_per_pass[self.place.stage] if self.stage.full_pass else 0
        return max(passing, self.stage.min_steps)

    def observe(self, step: int, performance: float) -> Advancement | None:
        """Count an evaluation after `step` rollout steps, and go to the next stage if nothing is missing.

        An evaluation at a step that was counted, or before it, changes nothing.

        Raises:
            TaskError: if the performance is not a pass rate.
        """
        if not (math.isfinite(performance) and 0 <= performance <= 1):
            raise TaskError(
                f"the evaluation of step {step} gave the pass rate {performance!r}, not one from 0 to 1"
            )
        if self.evaluations and step <= self.evaluations[-1].step:
            return None
        self.evaluations.append(Evaluation(step, performance, self.place.stage, self.place.round))
        found = self.performance
        enough = len(self.current) >= self.stage.min_evaluations
        enough = enough and step - self.place.start_step >= self.steps_needed
        if self.recorded or not enough or found is None or found < self.threshold:
            return None
        return self._advance(step, found)

    def follow(self, place: CurriculumPosition, step: int) -> Advancement:
        """Go to another stage at a step, because a recording says so."""
        return self._enter(place, step, None, None)

    def _advance(self, step: int, performance: float) -> Advancement | None:
        stage, number = self.place.stage + 1, self.place.round
        if stage == len(self.stages):
            stage, number = 0, number + 1
        if number > self.rules.max_rounds:
            return None
        return self._enter(CurriculumPosition(stage, number, step), step, performance, self.threshold)

    def _enter(
        self, place: CurriculumPosition, step: int, performance: float | None, threshold: float | None
    ) -> Advancement:
        old, self.place = self.place, place
        found = Advancement(step, old.stage, place.stage, old.round, place.round, performance, threshold)
        self.advancements.append(found)
        return found

    def metrics(self, step: int) -> dict[str, float | str]:
        """Return the values of `curriculum/*` after `step` rollout steps."""
        latest = self.evaluations[-1].performance if self.evaluations else None
        values: dict[str, float | str | None] = {
            "latest_performance": latest,
            "mean_performance": self.performance,
            "evaluation_count": len(self.evaluations),
            "stage_evaluations": len(self.current),
            "current_stage": self.place.stage,
            "stage_name": self.stage.name,
            "stage_count": len(self.stages),
            "round": self.place.round,
            "threshold": self.threshold,
            "current_step": step,
            "stage_steps": step - self.place.start_step,
            "stage_steps_needed": self.steps_needed,
            "advancements": len(self.advancements),
        }
        return {f"curriculum/{name}": value for name, value in values.items() if value is not None}

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON: the content of ``curriculum_state.json``, and of a checkpoint's part."""
        return {
            "schema_version": SCHEMA_VERSION,
            "current_stage": self.place.stage,
            "current_stage_name": self.stage.name,
            "current_round": self.place.round,
            "stage_start_step": self.place.start_step,
            "stage_count": len(self.stages),
            "last_update_step": self.evaluations[-1].step if self.evaluations else 0,
            "performance_history": [vars(found) for found in self.evaluations],
            "stage_advancement_log": [vars(found) for found in self.advancements],
            "stages": [stage.described() for stage in self.stages],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state; stages are found again by name, where the configuration was changed.

        Raises:
            TaskError: if it is not a state of a curriculum, or of one without this run's stages.
        """
        try:
            version = state["schema_version"]
            place = _whole(
                CurriculumPosition(state["current_stage"], state["current_round"], state["stage_start_step"])
            )
            names = [str(stage["name"]) for stage in state["stages"]]
            evaluations = [Evaluation(**entry) for entry in state["performance_history"]]
            advancements = [Advancement(**entry) for entry in state["stage_advancement_log"]]
            name = names[place.stage]
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise TaskError(f"""the state of the curriculum is damaged ({type(error).__name__}: {error}); restore
            curriculum_state.json from its checkpoint""") from error
        if version != SCHEMA_VERSION:
            raise TaskError(f"""the state of the curriculum has schema_version {version!r}, and this release reads
            {SCHEMA_VERSION}; use the release that wrote it""")
        own = [stage.name for stage in self.stages]
        if name not in own:
            raise TaskError(f"""the state of the curriculum is at stage {name!r}, which curriculum.stages does not have
            (it has {", ".join(own)}); name it there, or start without the state""")
        number = {index: own.index(old) for index, old in enumerate(names) if old in own}
        self.place = replace(place, stage=number[place.stage])
        self.evaluations = [
            replace(found, stage=number[found.stage]) for found in evaluations if found.stage in number
        ]
        self.advancements = [
            replace(found, from_stage=number[found.from_stage], to_stage=number[found.to_stage])
            for found in advancements
            if found.from_stage in number and found.to_stage in number
        ]


def _whole(place: CurriculumPosition) -> CurriculumPosition:
    least = {"stage": 0, "round": 1, "start_step": 0}
    for name, value in vars(place).items():
        if type(value) is not int or value < least[name]:
            raise ValueError(f"{name} is {value!r}")
    return place
