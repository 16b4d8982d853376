"""A run as its output directory tells it: metrics of every step and update, segments, evaluated samples."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regress.dump.metrics_file import (
    AFTER,
    METRICS,
    RESUMED_FROM,
    SEGMENT,
    STEP,
    TIME,
    UPDATE,
    Row,
    metrics_of,
    read_metrics,
    read_rows,
)
from regress.errors import DumpError

SAMPLES = "eval_samples.jsonl"
BETWEEN = ("eval_", "curriculum/", "inference/", "checkpoint/", "final/", "_")
"""Beginnings of metrics that are logged between steps, so that a row of them alone is none."""
LIMIT = 1 << 30
"""Bytes of a file that are read at most."""


@dataclass(frozen=True)
class Point:
    """A value of a metric: ``x`` is the step, plus the part of it that is done after an optimizer update."""

    x: float
    step: int
    update: int | None
    value: float | None


@dataclass(frozen=True)
class Segment:
    """One process of the run: number, checkpoint and place that it goes on from; times in seconds since 1970."""

    number: int
    resumed_from: str | None = None
    step: int = 0
    update: int | None = None
    started: float | None = None
    ended: float | None = None
    rows: int = 0


@dataclass(frozen=True)
class RunData:
    """Content of a run's output directory.

    Attributes:
        name: its last part, or what tells it from the other run.
        series: metric -> its values in order; null ones have no value.
        texts: metric -> ``(step, text)``, for metrics that are texts.
        samples: evaluated samples in order, with their step; fields as they were written.
        steps, updates: numbers of those with a value.
        notes: what is missing or was left out, a sentence each.
    """

    name: str
    folder: Path
    series: Mapping[str, Sequence[Point]]
    texts: Mapping[str, Sequence[tuple[int, str]]] = field(default_factory=dict)
    segments: Sequence[Segment] = ()
    samples: Sequence[Mapping[str, Any]] = ()
    steps: int = 0
    updates: int = 0
    notes: Sequence[str] = ()


def read_run(path: Path, name: str = "") -> RunData:
    """Read a run.

    Args:
        path: its output directory, or the ``metrics.jsonl`` in it.

    Raises:
        DumpError: if there is no such file, it cannot be read, a line but the last is damaged, or nothing is in it.
    """
    file = path / METRICS if path.is_dir() else path
    folder = file.parent
    if not path.exists():
        raise DumpError(f"{path} does not exist: give the output_dir of a run, which holds {METRICS}")
    if not file.is_file():
        raise DumpError(f"{path} has no {METRICS}, so it is no output_dir of a run: check the path")
    if file.stat().st_size > LIMIT:
        raise DumpError(f"{file} is larger than {LIMIT >> 20} MiB, too large for a page: cut it into parts")
    notes: list[str] = []
    rows = read_metrics(file, notes.append)
    if not any(metrics_of(row) for row in rows):
        raise DumpError(
            f"{file} holds no metrics: the run ended before its first step, or this is another file"
        )
    series, texts = _series(rows)
    samples = _samples(folder / SAMPLES, rows, notes)
    whole = read_rows(file, lambda _: None)
    steps = {row[STEP] for row in rows if any(not name.startswith(BETWEEN) for name in metrics_of(row))}
    updates = {(row[STEP], row[UPDATE]) for row in rows if _whole(row.get(UPDATE))}
    return RunData(
        name or folder.resolve().name,
        folder,
        series,
        texts,
        _segments(whole),
        samples,
        len(steps),
        len(updates),
        notes,
    )


def named_runs(paths: Sequence[Path]) -> list[RunData]:
    """Read one or two runs; two of the same name are told apart by their paths."""
    names = [(path if path.is_dir() else path.parent).resolve().name for path in paths]
    if len({*names}) < len(names):
        names = [str(path) for path in paths]
    return [read_run(path, name) for path, name in zip(paths, names, strict=True)]


def _series(rows: Sequence[Row]) -> tuple[dict[str, list[Point]], dict[str, list[tuple[int, str]]]]:
    """Return numbers and texts by metric; values of any other kind are left out."""
    of_step: dict[int, list[int]] = {}
    for row in rows:
        if _whole(row.get(UPDATE)):
            of_step.setdefault(row[STEP], []).append(row[UPDATE])
    series: dict[str, list[Point]] = {}
    texts: dict[str, list[tuple[int, str]]] = {}
    for row in rows:
        step, update = row[STEP], row.get(UPDATE)
        x = float(step)
        if update is not None and _whole(update):
            known = of_step[step]
            x += known.index(update) / len(known)
        else:
            update = None
        for name, value in metrics_of(row).items():
            if isinstance(value, str):
                texts.setdefault(name, []).append((step, value))
            elif value is None or isinstance(value, int | float):
                series.setdefault(name, []).append(Point(x, step, update, _number(value)))
    return series, texts


def _number(value: float | None) -> float | None:
    """Return a finite float; numbers that are not finite have no place on a page."""
    if value is None:
        return None
    try:
        known = float(value)
    except OverflowError:
        return None
    return known if math.isfinite(known) else None


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _segments(rows: Sequence[Row]) -> list[Segment]:
    """Return the processes of a run in the order of their numbers."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(row[SEGMENT], []).append(row)
    segments = []
    for number, own in sorted(found.items(), key=lambda item: str(item[0]).zfill(12)):
        start: Row = next((row for row in own if AFTER in row or RESUMED_FROM in row), {})
        times = [row[TIME] for row in own if isinstance(row.get(TIME), int | float)]
        resumed = start.get(RESUMED_FROM)
        segments.append(
            Segment(
                number if _whole(number) else 0,
                None if resumed is None else str(resumed),
                (start or own[0])[STEP],
                start.get(UPDATE) if _whole(start.get(UPDATE)) else None,
                min(times, default=None),
                max(times, default=None),
                sum(bool(metrics_of(row)) for row in own),
            )
        )
    return segments


def _samples(file: Path, rows: Sequence[Row], notes: list[str]) -> list[dict[str, Any]]:
    """Return evaluated samples: of each step those of its last segment, and none of steps that a resume undid."""
    if not file.exists():
        return []
    try:
        if not file.is_file() or file.stat().st_size > LIMIT:
            raise DumpError(f"{file} is not a file of at most {LIMIT >> 20} MiB")
        numbered = [row for row in read_rows(file, notes.append) if AFTER not in row]
    except DumpError as error:
        notes.append(f"the evaluated samples are left out: {error}")
        return []
    last = max((row[STEP] for row in rows), default=0) + 1  # an evaluation may end the run
    newest: dict[int, Any] = {}
    for row in numbered:
        newest[row[STEP]] = max(newest.get(row[STEP], row[SEGMENT]), row[SEGMENT], key=str)
    kept = [row for row in numbered if row[SEGMENT] == newest[row[STEP]] and row[STEP] <= last]
    return [
        {STEP: row[STEP], **{name: _text(value) for name, value in metrics_of(row).items()}} for row in kept
    ]


def _text(value: object) -> str | float | int | bool | None:
    """Return a field of a sample as it is shown: nested values as JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, str | int | float):
        return value
    return json.dumps(value, ensure_ascii=False)


def columns_of(samples: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the fields of samples, in the order in which they were first written."""
    return [*dict.fromkeys(name for sample in samples for name in sample)]
