"""Rows that a tracker did not take: ``wandb_backup/step_XXXXXX.json``, one file a step, until they are sent again."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypedDict

from regress.dump.metrics_file import SEQUENCE, STEP, Row
from regress.durable_files import write
from regress.errors import RegressError
from regress.json_schema import conform
from regress.untrusted_files import parse_json, read_bytes

FOLDER = "wandb_backup"
VERSION = 1
TRACKER, ROW = "tracker", "row"


class _Row(TypedDict):
    """Fields of every row; its metrics come besides."""

    step: int
    sequence: int


class _Entry(TypedDict):
    tracker: str
    row: _Row


class _Document(TypedDict):
    rows: list[_Entry]


class Backup:
    """Directory of the rows that trackers failed to take; threads may share it."""

    def __init__(self, output_dir: Path) -> None:
        self.folder = output_dir / FOLDER
        self._lock = threading.Lock()

    def add(self, tracker: str, rows: Iterable[Row]) -> None:
        """Add rows to the files of their steps; a row that is there already is not added again.

        Raises:
            OSError: if a file cannot be written; those of other steps are as they were.
        """
        with self._lock:
            for row in rows:
                path = self._path(row[STEP])
                entries = _entries(path)
                if not any(_is(entry, tracker, row) for entry in entries):
                    self._write(path, [*entries, {TRACKER: tracker, ROW: row}])

    def rows(self, tracker: str) -> list[Row]:
        """Return the rows that a tracker lacks, in the order in which they were logged."""
        with self._lock:
            entries = [entry for path in self._paths() for entry in _entries(path)]
        found = [entry[ROW] for entry in entries if entry[TRACKER] == tracker]
        return sorted(found, key=lambda row: int(row[SEQUENCE]))

    def remove(self, tracker: str, row: Row) -> None:
        """Drop a row that the tracker has taken at last; a file without rows is deleted."""
        with self._lock:
            path = self._path(row[STEP])
            left = [entry for entry in _entries(path) if not _is(entry, tracker, row)]
            if left:
                self._write(path, left)
            else:
                path.unlink(missing_ok=True)

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}.json"

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("step_*.json"))

    def _write(self, path: Path, entries: list[dict[str, Any]]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(path, {"schema_version": VERSION, "step": entries[0][ROW][STEP], "rows": entries})


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file so that a reader finds the old content or the new one, whole."""
    write(path, [(json.dumps(content, indent=1, allow_nan=False) + "\n").encode()])


def _entries(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file with the names of their trackers."""
    if not path.is_file():
        return []
    try:
        content = parse_json(read_bytes(path), wide=True)
        conform(content, _Document, "it")
    except (ValueError, OSError) as error:
        raise RegressError(
            f"{path} is not a backup of metrics; move it away, metrics.jsonl has every value"
        ) from error
    found: list[dict[str, Any]] = content["rows"]
    return found


def _is(entry: dict[str, Any], tracker: str, row: Row) -> bool:
    return bool(entry[TRACKER] == tracker and entry[ROW][SEQUENCE] == row[SEQUENCE])
