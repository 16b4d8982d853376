"""Recordings to replay: settings that ask for them, and the files of their steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CUT_OFF = "it was cut off or changed after it was written: copy it again or record again"


def mock(path: object) -> tuple[str, ...]:
    return (
        "rollout_worker.type=mock",
        "rollout_worker.need_llm_inference=false",
        f"rollout_worker.trajectory_load_path={path}",
    )


def rolled(folder: Path) -> tuple[str, ...]:
    return ("rollout_mock.enable=true", "rollout_mock.mode=mock", f"rollout_mock.dump_dir={folder}")


def step_file(dump: Path, step: int = 0) -> Path:
    (path,) = dump.glob(f"trajectory/step_{step:06d}.*")
    return path


def alone(path: Path, case: Any) -> Path:
    """A step file without the manifest that would guard it."""
    return path.rename(case.folder / f"alone{path.suffix}")
