"""Flags of the ``train`` command that are aliases of keys: one table for the command, the documentation and the errors.

Every flag may be written with dashes or underscores. Imports nothing, because help texts read it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Flag:
    """Alias of a key.

    Attributes:
        name: with dashes.
        key: the key that it sets.
        given: value of a flag that is written without one; None: it takes a value.
        optional: True if it may be written with a value all the same.
        metavar: word for its value in help texts.
    """

    name: str
    key: str
    given: str | None = None
    optional: bool = False
    metavar: str = "TEXT"

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every way to write the flag."""
        return tuple(dict.fromkeys((f"--{self.name}", f"--{self.name.replace('-', '_')}")))


FLAGS: tuple[Flag, ...] = (
    Flag("output-dir", "output_dir", metavar="DIR"),
    Flag("model-name", "model.path", metavar="DIR|NAME"),
    Flag("lr", "optimizer.learning_rate", metavar="NUMBER"),
    Flag("learning-rate", "optimizer.learning_rate", metavar="NUMBER"),
    Flag("group-size", "data.group_size", metavar="N"),
    Flag("rollouts-per-step", "data.prompts_per_step", metavar="N"),
    Flag("train-batch-size", "trainer.mini_batch_size", metavar="N"),
    Flag("per-device-train-batch-size", "batching.micro_batch_size", metavar="N"),
    Flag("temperature", "rollout_worker.temperature", metavar="NUMBER"),
    Flag("max-length", "data.max_seq_length", metavar="N"),
    Flag("seed", "seed", metavar="N"),
    Flag("max-prompts", "task.train_size", metavar="N"),
    Flag("eval-every-n-steps", "evaluation.every_n_steps", metavar="N"),
    Flag("max-eval-samples", "evaluation.max_samples", metavar="N"),
    Flag("dataset-path", "task.dataset_path", metavar="FILE"),
    Flag("enable-curriculum", "curriculum.enable", given="true", optional=True, metavar="true|false"),
    Flag("save-steps", "trainer.save_steps", metavar="N"),
    Flag("checkpoint-interval", "trainer.save_steps", metavar="N"),
    Flag("save-total-limit", "trainer.save_total_limit", metavar="N"),
    Flag("resume-from-checkpoint", "trainer.resume_from_checkpoint", metavar="DIR"),
    Flag("wandb", "tracking.trackers", given="[wandb]"),
    Flag("no-wandb", "tracking.trackers", given="[]"),
    Flag("wandb-project", "tracking.project", metavar="NAME"),
    Flag("run-name", "tracking.run_name", metavar="NAME"),
    Flag("wandb-run-name", "tracking.run_name", metavar="NAME"),
    Flag("log-dir", "tracking.log_dir", metavar="DIR"),
    Flag("force-new-wandb-run", "tracking.force_new_run", given="true"),
)

TRACKERS = "tracking.trackers"
OF_WANDB = ("wandb-project", "wandb-run-name", "force-new-wandb-run")
"""Flags that mean nothing without wandb, so they switch it on."""


def flag_named(name: str) -> Flag:
    """Return the flag of a name with dashes or underscores."""
    return next(flag for flag in FLAGS if flag.name == name.replace("_", "-"))
