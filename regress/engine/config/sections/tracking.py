"""Destinations of metrics."""

from dataclasses import dataclass, field


@dataclass
class TrackingConfig:
    """Destinations of metrics besides metrics.jsonl."""

    trackers: list[str] = field(
        default_factory=list,
        metadata={
            "help": "names of trackers, as accelerate knows them: tensorboard, wandb, trackio, swanlab and others"
        },
    )
