"""Epochs, mini-batches, optimizer and learning-rate schedule."""

from dataclasses import dataclass, field

from regress.engine.config.sections.value import value

OPTIMIZERS = ("auto", "for_loop", "foreach", "fused")
SCHEDULERS = ("constant", "linear", "cosine")


@dataclass
class TrainerConfig:
    """Mini-batches and epochs."""

    epochs: int = value(1, "passes over a rollout batch", minimum=1)
    mini_batch_size: int | None = value(
        None, "samples per optimizer update; null: the whole rollout batch", minimum=1
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
