"""Disk space that the recording of a run takes, estimated before anything is computed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from regress.dump.dump_location import is_remote
from regress.engine.config.config_schema import Config
from regress.engine.evaluation import due
from regress.engine.run_log import LOGGER, MOCK, megabytes

_TOKEN_BYTES = 8 + 1 + 8
"""Token, loss mask and log-prob."""
_TEXT_BYTES = 2 * 4
"""Text of a token, in the completion and in its turn."""
_SAMPLE_BYTES = 1024
"""Ids, rewards and field names of a sample."""


def recording_size(config: Config) -> tuple[int, int]:
    """Return the bytes that the recording of one step may take, and that of all steps and evaluations."""
    sample = config.data.max_seq_length * (_TOKEN_BYTES + _TEXT_BYTES) + _SAMPLE_BYTES
    step = config.data.prompts_per_step * config.data.group_size * sample
    evaluations = sum(due(config, number) for number in range(config.max_steps + 1))
    return step, step * config.max_steps + evaluations * config.task.eval_size * sample


def log_estimate(config: Config) -> None:
    """Log the disk space of recorded rollouts; warn if less is free."""
    folder = config.rollout_mock.dump_dir
    step, whole = recording_size(config)
    estimate = f"disk: up to {megabytes(step)} a step, {megabytes(whole)} for max_steps={config.max_steps}"
    if is_remote(folder):
        LOGGER.info("%s %s", MOCK, estimate)
        return
    free = shutil.disk_usage(_existing(Path(folder))).free
    say = LOGGER.warning if free < whole else LOGGER.info
    say("%s %s; %s are free for %s", MOCK, estimate, megabytes(free), folder)


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    folder = Path(os.path.abspath(folder))  # noqa: PTH100 - resolve() would follow links
    return next(path for path in (folder, *folder.parents) if path.exists())
