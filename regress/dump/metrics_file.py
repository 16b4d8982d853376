"""File of a run's metrics, ``metrics.jsonl``: appended to by every segment, and read as if nothing had interrupted it.

One JSON object a line: ``{"segment": 0, "sequence": 17, "time": 1732280000.1, "step": 3, "update": 5, NAME: value}``.
``sequence`` numbers the rows of the file, ``update`` is there for rows of one optimizer update. A process that goes on
with a run, or starts anew in its directory, first writes a row that says so::

    {"segment": 1, "sequence": 40, "time": ..., "step": 3, "update": 6, "resumed_from": "checkpoint-3", "after": 31}

``after`` is the sequence number of the last row that its starting point (the checkpoint) knows: the rows between it and
this one tell of steps that are made again, so the read view leaves them out. It follows these numbers from the newest
segment back, so that a run may go on from any of its checkpoints, in any order.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

from regress.errors import DumpError, RegressError
from regress.json_schema import Count, Least, conform
from regress.untrusted_files import parse_json, read_bytes

METRICS = "metrics.jsonl"
SEGMENT, SEQUENCE, TIME, STEP, UPDATE = "segment", "sequence", "time", "step", "update"
RESUMED_FROM, AFTER = "resumed_from", "after"
HEADER = (SEGMENT, SEQUENCE, TIME, STEP, UPDATE, RESUMED_FROM, AFTER)
"""Fields of a row that are not metrics."""

Row = dict[str, Any]
Notice = Callable[[str], None]


class _Header(TypedDict):
    """Fields of a row that are not metrics; the numbers of rows of an older release are missing."""

    step: int
    segment: NotRequired[Count]
    sequence: NotRequired[Annotated[int, Least(-1)]]
    after: NotRequired[int]
    time: NotRequired[Any]


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=4)


def read_metrics(path: Path | str, notice: Notice = _warn) -> list[Row]:
    """Return the metrics of a run as if it had never been interrupted: each step and update once.

    Values logged for the same step and update are one row; its header is that of the last of them. Rows are sorted by
    step, those of whole steps before those of the step's updates.

    Args:
        path: ``metrics.jsonl`` of the run.
        notice: called with one sentence, that a torn last line was dropped.

    Raises:
        DumpError: if the file cannot be read, or a line before the last one is damaged.
    """
    merged: dict[tuple[int, int], Row] = {}
    for row in valid_rows(read_rows(path, notice)):
        key = (row[STEP], row.get(UPDATE, -1))
        merged[key] = {**merged.get(key, {}), **row}
    return [merged[key] for key in sorted(merged)]


def read_rows(path: Path | str, notice: Notice = _warn) -> list[Row]:
    """Return every row as it was written, those that say where a segment starts included.

    Raises:
        DumpError: as `read_metrics` does.
    """
    rows, whole, size = _parsed(Path(path))
    if whole < size:
        notice(
            f"{path}: its last line is torn ({size - whole} bytes), so a kill came while it was written; dropped"
        )
    return rows


def valid_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of metrics that belong to the newest segment and to those it goes on from, as written."""
    chain: list[Row] = []
    bound = math.inf
    for row in reversed(rows):
        if row[SEQUENCE] > bound:
            continue
        if AFTER in row:
            bound = row[AFTER]
        else:
            chain.append(row)
    return chain[::-1]


def metrics_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a row, without its header."""
    return {name: value for name, value in row.items() if name not in HEADER}


class MetricsWriter:
    """Appends rows to a metrics file; nothing is written, and nothing of a torn line removed, before the first row.

    Attributes:
        segment: number of this process's part of the run.
        sequence: number of the last row written, here or by an earlier segment; -1: none.
    """

    def __init__(
        self,
        path: Path,
        *,
        resumed_from: str | None = None,
        step: int = 0,
        update: int = 0,
        after: int = -1,
        segment: int = 0,
        anew: bool = False,
    ) -> None:
        """Read what the file holds.

        Args:
            path: the file; its directory exists.
            resumed_from: name of the checkpoint; ``None``: the run starts at its beginning.
            step: completed rollout steps in the checkpoint.
            update: completed optimizer updates in the checkpoint.
            after: `sequence` when the checkpoint's state was taken.
            segment: least number of this segment, one above the checkpoint's.
            anew: replace what the file holds, without looking at it.
        """
        self._path = path
        self._file: FileIO | None = None
        rows: list[Row] = []
        self._whole = 0
        if not anew and _is_there(path):
            rows, self._whole, _ = _parsed(path)
        self.sequence = max([after, *(row[SEQUENCE] for row in rows)])
        self.segment = max([segment, *(row[SEGMENT] + 1 for row in rows)])
        self._start: Row | None = None
        if rows or resumed_from is not None:
            self._start = {STEP: step, UPDATE: update, RESUMED_FROM: resumed_from, AFTER: after}

    def write(self, metrics: Mapping[str, Any], *, step: int, update: int | None = None) -> Row:
        """Append one row in a single write, and return it; numbers that are not finite are null.

        Raises:
            RegressError: for a name of the row's header, or a value that is not a number or text.
            OSError: if the file cannot be written.
        """
        plain = {name: _plain(name, value) for name, value in metrics.items()}
        self.start()
        return self._append({STEP: step, **({} if update is None else {UPDATE: update}), **plain})

    def start(self) -> None:
        """Open the file; write the row that starts this segment, unless it is the first of its file."""
        if self._file is not None:
            return
        self._file = FileIO(self._path, "a+")
        self._file.truncate(self._whole)
        self._file.seek(max(0, self._whole - 1))
        if self._file.read(1) not in (b"", b"\n"):
            self._put(b"\n")  # the last row is whole, its end of line was not written
        if self._start is not None:
            self._append(self._start)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self.close()

    def _append(self, content: Mapping[str, Any]) -> Row:
        row = {SEGMENT: self.segment, SEQUENCE: self.sequence + 1, TIME: time.time(), **content}
        self._put(json.dumps(row, allow_nan=False).encode() + b"\n")
        self.sequence += 1
        return row

    def _put(self, data: bytes) -> None:
        assert self._file is not None
        while data:
            data = data[self._file.write(data) or 0 :]


def _plain(name: str, value: Any) -> Any:
    if name in HEADER:
        raise RegressError(
            f"a metric cannot have the name {name!r}, which is a field of each row; rename the metric"
        )
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    raise RegressError(f"the metric {name!r} is a {type(value).__name__}; log a number or a text")


def _is_there(path: Path) -> bool:
    """Return True unless there is no file: also for one that cannot be reached, which reading it says why."""
    try:
        path.stat()
    except FileNotFoundError:
        return False
    except OSError:
        pass
    return True


def _parsed(path: Path) -> tuple[list[Row], int, int]:
    """Return the rows, the number of bytes that they take, and that of the file."""
    try:
        data = read_bytes(path)
    except OSError as error:
        raise DumpError(
            f"{path} cannot be read ({error.strerror or error}); name a run's {METRICS}"
        ) from error
    rows: list[Row] = []
    whole = 0
    for number, (start, line) in enumerate(_lines(data), 1):
        row = _row(line, len(rows))
        if row is not None:
            rows.append(row)
        elif line.strip() and start + len(line) < len(data):
            raise DumpError(f"""{path}: line {number} is not a row of metrics, and it is not the last one, so no kill
            explains it; restore the file or remove the line""")
        elif line.strip():
            break
        whole = start + len(line)
    return rows, whole, len(data)


def _lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Return each line with its first byte's place, its end of line included."""
    start = 0
    while start < len(data):
        end = data.find(b"\n", start) + 1 or len(data)
        yield start, data[start:end]
        start = end


def _row(line: bytes, index: int) -> Row | None:
    """Return a line's row; rows of an older release have no segment and no number."""
    try:
        row = parse_json(line, finite=False, wide=True)
    except (ValueError, RecursionError):
        return None
    try:
        conform(row, _Header, "a row")
    except ValueError:
        return None
    if not isinstance(row.get(UPDATE, 0), int) or isinstance(row.get(UPDATE), bool):
        row = {
            name: value for name, value in row.items() if name != UPDATE
        }  # another program's, that counts none
    known = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }
    return {SEGMENT: 0, SEQUENCE: index, **known}
