"""Evaluation on held-out prompts."""

from dataclasses import dataclass, field

from regress.engine.config.sections.value import value


@dataclass
class EvaluationConfig:
    """Evaluation: greedy pass rate on held-out prompts, and pass@k from samples."""

    every_n_steps: int = value(
        0, "evaluate before the first step, every so many steps and at the end; 0: never", minimum=0
    )
    max_samples: int | None = value(
        None, "held-out prompts that are evaluated, the same ones each time; null: all", minimum=1
    )
    samples_per_prompt: int = value(
        0, "completions sampled of each prompt besides the greedy one, for pass@k; 0: none", minimum=0
    )
    pass_at_k: list[int] = field(
        default_factory=list,
        metadata={
            "help": "values of k for pass@k, each at most samples_per_prompt; []: 1 and samples_per_prompt",
            "minimum": 1,
        },
    )
    temperature: float | None = value(
        None,
        "temperature of the sampled completions; null: rollout_worker.temperature",
        exclusive_minimum=0.0,
    )
    seed: int | None = value(
        None, "seed of the sampled completions; null: seed", minimum=0, maximum=2**32 - 1
    )
