"""Name of a run in its trackers: project, run id, directory; from keys, environment, checkpoint, in this order."""

from __future__ import annotations

import os
import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regress.errors import ConfigError

ID_LENGTH = 21
"""Characters of a run id: SwanLab takes no other length."""
RESUME_MODES = ("allow", "must", "never", "auto")


@dataclass(frozen=True)
class Wishes:
    """Keys of section ``tracking``, and what takes the place of those that are null.

    Attributes:
        name: experiment name, for a project or a run without a name of its own.
        output_dir: directory of the run's files.
        settings: configuration of the run, dotted keys and scalars, without credentials.
    """

    name: str
    output_dir: Path
    project: str | None = None
    run_name: str | None = None
    run_id: str | None = None
    log_dir: str | None = None
    force_new_run: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """Run that a tracker is opened with.

    Attributes:
        run_id: id of the run in every tracker.
        resume_mode: ``WANDB_RESUME`` of the user, or ``allow``.
        segment: number of this process's part of the run.
        step: completed rollout steps at the start of this segment.
        update: completed optimizer updates at its start.
        log_dir: directory for a tracker that keeps files, from the key; ``None``: not given.
    """

    project: str
    run_name: str
    run_id: str
    resume_mode: str
    segment: int
    step: int
    update: int
    output_dir: Path
    log_dir: Path | None
    project_is_default: bool
    settings: Mapping[str, Any]

    @property
    def unique_name(self) -> str:
        """Name for trackers that know a run by its name alone."""
        return f"{self.run_name}-{self.run_id}"

    def directory(self, tracker: str) -> Path:
        """Return where a tracker keeps its files."""
        return (self.log_dir or self.output_dir) / tracker


def find_target(
    wishes: Wishes,
    *,
    known_id: str | None,
    segment: int,
    step: int,
    update: int,
    environ: Mapping[str, str] = os.environ,
) -> Target:
    """Return the run that trackers continue or begin.

    The id is that of ``force_new_run`` (a new one), else of ``run_id``, else of ``WANDB_RUN_ID``, else of the
    checkpoint (``known_id``), else a new one.

    Raises:
        ConfigError: if ``WANDB_RESUME`` is none of wandb's modes.
    """
    mode = environ.get("WANDB_RESUME") or "allow"
    mode = "allow" if mode.lower() == "true" else mode
    if mode not in RESUME_MODES:
        raise ConfigError(f"WANDB_RESUME={mode!r} must be one of {', '.join(RESUME_MODES)}")
    given = wishes.run_id or environ.get("WANDB_RUN_ID") or known_id
    if wishes.force_new_run:
        given, mode = None, "never"
    return Target(
        project=wishes.project or wishes.name,
        project_is_default=wishes.project is None,
        run_name=wishes.run_name or wishes.name,
        run_id=given or new_id(),
        resume_mode=mode,
        segment=segment,
        step=step,
        update=update,
        output_dir=wishes.output_dir,
        log_dir=None if wishes.log_dir is None else Path(wishes.log_dir),
        settings=wishes.settings,
    )


def new_id() -> str:
    """Return a random run id; the operating system draws it, so no generator of the training moves."""
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(ID_LENGTH))
