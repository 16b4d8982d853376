"""Task, sizes of its batches, and the warm start on its answers."""

from dataclasses import dataclass, field
from typing import Any

from regress.engine.config.sections.value import value

CUSTOM = "custom"
STRATEGIES = ("balanced", "prompt_heavy", "completion_heavy", CUSTOM)


@dataclass
class TaskConfig:
    """Training task."""

    name: str | None = value(
        "reverse_string",
        "name of the task, or your own as package.module:function; null: prompts come from the recording that is "
        "replayed",
    )
    dataset_path: str | None = value(
        None,
        "file of prompts with answers, in place of name: a JSON array, JSON lines or parquet; null: none",
    )
    prompt_field: str = value(
        "prompt", "dataset_path: field of the prompt (text, one chat message or token ids)"
    )
    answer_field: str = value("answer", "dataset_path: field of the right answer")
    level_field: str = value(
        "level", "dataset_path: field of the difficulty (a name or a number), if it is there"
    )
    complexity_field: str = value(
        "complexity", "dataset_path: field of the complexity (0 to 10), if it is there"
    )
    level: int = value(1, "difficulty of the generated prompts", minimum=1)
    params: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "parameters of the generator that override the level's"}
    )
    train_size: int | None = value(
        None, "prompts in the training split; null: 512, or all of dataset_path but eval_size", minimum=1
    )
    eval_size: int = value(64, "prompts in the held-out split", minimum=0)
    eval_path: str | None = value(
        None, "file of held-out prompts with answers, as dataset_path, in place of a split; null: none"
    )
    max_turns: int = value(1, "completions in a conversation, at most", minimum=1)
    environment: str | None = value(
        None,
        "what answers every completion but the last: checker, calculator, search, or your own as "
        "package.module:function",
    )
    answer_tags: bool = value(
        False, "the warm start shows answers as <answer>...</answer>, which answers at once then take"
    )
    rewards: dict[str, float] = field(
        default_factory=lambda: {"exact_match": 1.0},
        metadata={"help": "weight of each reward of a conversation, by name"},
    )


@dataclass
class DataConfig:
    """Batch and sequence sizes."""

    prompts_per_step: int = value(8, "prompts (groups) in a rollout batch", minimum=1)
    group_size: int = value(8, "completions sampled per prompt", minimum=1)
    filter_groups: bool = value(
        False,
        "dynamic sampling (DAPO): groups whose samples have equal rewards are replaced by groups of further prompts",
    )
    filter_metric: str = value(
        "reward", "filter_groups: reward that must differ, the whole one or one of task.rewards"
    )
    max_generation_batches: int = value(
        10, "filter_groups: batches of prompts sampled for a step, at most; 0: any number", minimum=0
    )
    max_prompt_length: int = value(32, "longest prompt in tokens", minimum=1)
    max_completion_length: int = value(
        16, "longest completion in tokens; with several turns, everything after the prompt", minimum=1
    )
    max_seq_length: int = value(48, "longest prompt and completion together, in tokens", minimum=2)
    length_allocation_strategy: str | None = value(
        None,
        "division of max_seq_length between prompt and completion: halves, 60 to 40, 40 to 60, or as the two lengths "
        "say; null: halves where max_seq_length alone is given",
        choices=STRATEGIES,
    )


@dataclass
class WarmStartConfig:
    """Supervised steps before the first rollout."""

    steps: int = value(0, "supervised steps before the first rollout", minimum=0)
    batch_size: int = value(32, "examples per supervised step", minimum=1)
    learning_rate: float = value(3e-3, "learning rate of the supervised steps", minimum=0.0)
