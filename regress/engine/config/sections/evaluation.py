"""Evaluation on held-out prompts."""

from dataclasses import dataclass

from regress.engine.config.sections.value import value


@dataclass
class EvaluationConfig:
    """Evaluation: greedy pass rate on held-out prompts."""

    every_n_steps: int = value(
        0, "evaluate before the first step, every so many steps and at the end; 0: never", minimum=0
    )
