"""State of the trackers on disk, ``wandb_sync_state.json``: run id, and what each has taken. Imports no torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from regress.engine.tracking.tracker_backup import write_json
from regress.errors import RegressError
from regress.json_schema import conform
from regress.untrusted_files import parse_json, read_bytes

STATE = "wandb_sync_state.json"
VERSION = 1
EVERY = 1.0
"""Seconds between two writes that nothing makes urgent."""


class _Versioned(TypedDict):
    schema_version: int


class _Tracker(TypedDict):
    run_id: str
    acknowledged: NotRequired[int]


class _Document(_Versioned):
    trackers: dict[str, _Tracker]
    name: NotRequired[str | None]
    project: NotRequired[str | None]
    run_name: NotRequired[str | None]


class SyncState:
    """Writer of the state file; threads may share it."""

    def __init__(self, output_dir: Path, content: Callable[[], dict[str, Any]]) -> None:
        self._path = output_dir / STATE
        self._content = content
        self._lock = threading.Lock()
        self._written = 0.0

    def changed(self, urgent: bool) -> None:
        """Write the state if that is urgent or the file is old; one that cannot be written never stops anything."""
        if urgent or time.monotonic() - self._written >= EVERY:
            with suppress(OSError):
                self.save()

    def save(self) -> Path:
        """Write the state, and return the path of the file.

        Raises:
            OSError: if it cannot be written.
        """
        with self._lock:
            self._written = time.monotonic()
            write_json(self._path, {"schema_version": VERSION, "time": time.time(), **self._content()})
        return self._path


def read_sync_state(output_dir: Path) -> dict[str, Any] | None:
    """Return the content of a run's state file, or ``None`` if it has none.

    Raises:
        RegressError: if the file is damaged, or of a newer release.
    """
    path = output_dir / STATE
    if not path.exists():
        return None
    try:
        content = parse_json(read_bytes(path))
        conform(content, _Versioned, "it")
        version: int = content["schema_version"]
        if version <= VERSION:
            conform(content, _Document, "it")
    except (OSError, ValueError) as error:
        raise RegressError(f"{path} is damaged; delete it, and the next run writes a new one") from error
    if version > VERSION:
        raise RegressError(f"""{path} has the schema version {version}, but this release knows up to {VERSION}; use the
        release that wrote it, or delete it""")
    return dict(content)


def acknowledge(output_dir: Path, tracker: str, sequence: int) -> None:
    """Note in the state file of a run that is over that a tracker has taken every row up to a number."""
    content = read_sync_state(output_dir)
    if content is None or tracker not in content["trackers"]:
        return
    entry = content["trackers"][tracker]
    entry["acknowledged"] = max(entry.get("acknowledged", -1), sequence)
    write_json(output_dir / STATE, content)
