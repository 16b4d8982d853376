"""Destinations of metrics."""

from dataclasses import dataclass, field

from regress.engine.config.sections.value import value


@dataclass
class TrackingConfig:
    """Destinations of metrics besides metrics.jsonl."""

    trackers: list[str] | None = field(
        default_factory=list,
        metadata={
            "help": "names of trackers, as accelerate knows them: tensorboard, wandb, trackio, swanlab and others; "
            "null: wandb if it is installed and has a login, else tensorboard if that is installed, else none"
        },
    )
    project: str | None = value(
        None, "project of the run in its trackers; null: WANDB_PROJECT for wandb, else exp_name"
    )
    run_name: str | None = value(None, "name of the run in its trackers; null: exp_name")
    run_id: str | None = value(
        None,
        "id of the run in its trackers; null: WANDB_RUN_ID, else the id in the checkpoint that is resumed, else a "
        "new one",
    )
    log_dir: str | None = value(
        None, "directory of trackers that keep files; null: WANDB_DIR for wandb, else output_dir"
    )
    force_new_run: bool = value(False, "begin a new run in the trackers, whatever the run that is resumed")
    queue_size: int = value(
        1000, "rows that wait for a tracker, at most; the others go to wandb_backup/", minimum=1
    )
    finish_timeout: float = value(
        30.0,
        "seconds for which the end of the run waits for trackers; what they have not taken goes to wandb_backup/",
        minimum=0.0,
    )
