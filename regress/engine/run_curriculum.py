"""Curriculum of a run: evaluations that it counts, and the file of its state."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from regress.dump.dump_files import write_atomically
from regress.engine.config.config_schema import Config
from regress.engine.evaluation import Outcome
from regress.errors import DumpError, RegressError
from regress.tasks.curriculum import Advancement, Curriculum

STATE = "curriculum_state.json"


def observe(curriculum: Curriculum, outcome: Outcome, config: Config) -> Advancement | None:
    """Count an evaluation: the greedy pass rate on the stage's held-out problems, or on all of them."""
    stage = curriculum.stage
    whole = config.curriculum.judged_on == "all"
    rate = outcome.pass_rate if whole else outcome.pass_rate_of(stage.admits)
    return curriculum.observe(outcome.step, rate)


def describe_advancement(found: Advancement, curriculum: Curriculum) -> str:
    """Return the line of the log that tells of a change of stage."""
    names = [stage.name for stage in curriculum.stages]
    why = (
        "as recorded"
        if found.performance is None
        else f"pass rate {found.performance:.3f} of {found.threshold:.3f}"
    )
    return (
        f"step {found.step}: curriculum goes from stage {names[found.from_stage]} (round {found.from_round}) to "
        f"{names[found.to_stage]} (round {found.to_round}): {why}"
    )


def at_stage(curriculum: Curriculum, step: int) -> str:
    """Return the line of the log that tells of the stage in which a run starts or goes on."""
    place, number = curriculum.place, len(curriculum.stages)
    return f"step {step}: stage {curriculum.stage.name} ({place.stage + 1} of {number}, round {place.round})"


def write_state(folder: Path | None, state: Mapping[str, Any]) -> None:
    """Write ``curriculum_state.json`` whole or not at all; without a folder this rank writes nothing.

    Raises:
        RegressError: if the file cannot be written.
    """
    if folder is None:
        return
    try:
        write_atomically(folder / STATE, [json.dumps(state, indent=2, allow_nan=False).encode() + b"\n"])
    except DumpError as error:
        raise RegressError(f"the state of the curriculum cannot be written: {error}") from error
