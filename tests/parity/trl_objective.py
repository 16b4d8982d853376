"""TRL's trainers, built once, whose settings are changed between calls of their own functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from parity_world import GROUP_SIZE, GROUPS, MAX_COMPLETION_LENGTH, World
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

LOSS_TYPES: dict[str, str] = {
    "grpo": "trl:grpo",
    "dapo": "trl:dapo",
    "bnpo": "trl:bnpo",
    "dr_grpo": "trl:dr_grpo",
    "cispo": "trl:cispo",
    "sapo": "trl:sapo",
    "vespo": "trl:vespo",
    "luspo": "trl:luspo",
}
"""Value of ``loss_type`` -> preset with this loss."""
LEVELS = ("token", "sequence")
SCALES = ("group", "batch", "none")
AGGREGATIONS_OF_REWARDS = ("sum_then_normalize", "normalize_then_sum")
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")

Reward = Callable[..., list[float | None]]


def make_trainer(kind: str, world: World, folder: Path, rewards: Sequence[Reward], **settings: Any) -> Any:
    """Return a ``GRPOTrainer`` or, for ``kind="rloo"``, an ``RLOOTrainer`` of one microbatch, on the CPU."""
    chosen: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": GROUPS * GROUP_SIZE,
        "gradient_accumulation_steps": 1,
        "num_generations": GROUP_SIZE,
        "max_completion_length": MAX_COMPLETION_LENGTH,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "model_init_kwargs": {"dtype": "auto"},
        "report_to": "none",
    } | settings
    built: dict[str, Any] = {
        "model": str(world.path),
        "reward_funcs": list(rewards),
        "train_dataset": Dataset.from_dict({"prompt": ["w2"] * GROUPS}),
    }
    trainer: Any
    if kind == "rloo":
        trainer = RLOOTrainer(args=RLOOConfig(**chosen), **built)
    else:
        trainer = GRPOTrainer(args=GRPOConfig(**chosen), **built)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer
