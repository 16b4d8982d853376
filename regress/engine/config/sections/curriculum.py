"""Curriculum: stages of growing difficulty that an evaluation ends."""

from dataclasses import dataclass, field
from typing import Any

from regress.engine.config.sections.value import value

JUDGED_ON = ("stage", "all")


@dataclass
class CurriculumConfig:
    """Curriculum over levels and complexity of the problems."""

    enable: bool = value(False, "train on one stage after the other, as evaluations end them")
    stages: list[Any] | None = field(
        default=None,
        metadata={
            "help": "stages, each with name, levels, complexity, threshold, min_evaluations, min_steps and full_pass; "
            "null: foundation, elementary, intermediate, advanced, expert, comprehensive, for problems of five levels"
        },
    )
    thresholds: dict[str, float] = field(
        default_factory=dict,
        metadata={
            "help": "pass rate of the first round that ends a stage, by its name, in place of the stage's own"
        },
    )
    min_evaluations: int = value(5, "least evaluations in a stage that does not tell", minimum=1)
    full_pass: bool = value(
        True, "whether each problem of a stage that does not tell must have been trained on once"
    )
    window: int = value(2, "latest evaluations of a stage whose mean must reach the threshold", minimum=1)
    judged_on: str = value(
        "stage", "held-out problems whose pass rate counts: those of the stage, or all", choices=JUDGED_ON
    )
    max_rounds: int = value(
        5, "rounds through the stages; after the last one the last stage stays", minimum=1
    )
    threshold_increment: float = value(
        0.1, "what every round adds to the thresholds", minimum=0.0, maximum=1.0
    )
    threshold_limit: float = value(
        0.95, "highest threshold of a later round", exclusive_minimum=0.0, maximum=1.0
    )
