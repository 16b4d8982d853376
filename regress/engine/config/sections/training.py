"""Epochs, mini-batches, checkpoints, optimizer and learning-rate schedule."""

from dataclasses import dataclass, field

from regress import plugins
from regress.engine.config.sections.value import value

OPTIMIZERS = ("auto", "for_loop", "foreach", "fused")
NONFINITE = ("stop", "skip")
TRAINERS = ("local", "remote")
RESAMPLINGS = ("none", "pow", "max_min", "max_random")
SCHEDULERS = ("constant", "linear", "cosine")


@dataclass
class TrainerConfig:
    """Mini-batches and epochs, checkpoints and what to go on from."""

    type: str = value(
        "local",
        "where the model is trained: in this process and its ranks, or in the training service that section service "
        "names",
        choices=TRAINERS,
        more=lambda: plugins.registered(plugins.TRAINERS),
    )
    epochs: int = value(1, "passes over a rollout batch", minimum=1)
    mini_batch_size: int | None = value(
        None, "samples per optimizer update; null: the whole rollout batch", minimum=1
    )
    resampling: str = value(
        "none",
        "draw the samples of a rollout anew, with replacement, by their rewards R (PF-PPO, arXiv 2409.06957): pow by "
        "|R|^resampling_power, max_min only those of the greatest and least R, max_random 4 to 1 for the greatest R; "
        "none: each sample once",
        choices=RESAMPLINGS,
    )
    resampling_power: float = value(2.0, "power of resampling=pow", minimum=0.0)
    save_steps: int | None = value(
        None, "write a checkpoint after every so many steps, and at the end; null: none", minimum=1
    )
    save_updates: int | None = value(
        None,
        "write a checkpoint after every so many optimizer updates, also inside a step, and at the end; null: none",
        minimum=1,
    )
    save_total_limit: int | None = value(
        None, "keep only so many checkpoints, the newest; null: all", minimum=1
    )
    checkpoint_dir: str = value(
        "${output_dir}", "directory of the checkpoints, or its URL in a store: s3://bucket/run"
    )
    resume_from_checkpoint: str | None = value(
        None,
        "go on from this checkpoint: its directory or URL, or latest for the newest in checkpoint_dir (none there: "
        "start at the beginning); null: start at the beginning",
    )
    on_nonfinite: str = value(
        "stop",
        "what follows a loss or gradient that is not finite on any rank: stop ends the run, skip leaves that update "
        "out on all ranks and counts it",
        choices=NONFINITE,
    )


@dataclass
class OptimizerConfig:
    """AdamW, clipping and schedule."""

    learning_rate: float = value(1e-3, "peak learning rate of AdamW", minimum=0.0)
    betas: list[float] = field(
        default_factory=lambda: [0.9, 0.999],
        metadata={
            "help": "decay of the first and second moment",
            "length": 2,
            "minimum": 0.0,
            "exclusive_maximum": 1.0,
        },
    )
    eps: float = value(1e-8, "added to the root of the second moment", exclusive_minimum=0.0)
    weight_decay: float = value(0.0, "decoupled weight decay", minimum=0.0)
    max_grad_norm: float | None = value(
        1.0, "gradients are clipped to this global norm; null: never", exclusive_minimum=0.0
    )
    implementation: str = value(
        "auto",
        "how torch computes an update: one parameter after the other, horizontally or vertically fused; "
        "auto: torch's choice",
        choices=OPTIMIZERS,
    )
    factory: str | None = value(
        None,
        "your own optimizer, as package.module:function: takes a list of (name, parameter), the learning rate, and "
        "betas, eps and weight_decay by name, returns a torch.optim.Optimizer; null: AdamW of torch",
    )
    state_path: str | None = value(
        None, "file of a dump (type optimizer) that holds the state to start from; null: none"
    )
    lr_scheduler: str = value("constant", "learning rate after the warmup", choices=SCHEDULERS)
    warmup_steps: int = value(0, "optimizer updates over which the learning rate rises linearly", minimum=0)
