"""Inspection of dumps: plain rows for programs, tables for a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from regress.dump.arrays import Array, dtype_name, is_float
from regress.dump.coordinates import parse_stem
from regress.dump.jsontext import tag_floats
from regress.dump.location import Location, children, location, size
from regress.dump.manifest import MANIFEST
from regress.dump.reader import DumpReader, is_dump_file, read_all
from regress.dump.record import Record
from regress.dump.stages import STAGES
from regress.dump.trajectory import Trajectory, from_record
from regress.errors import DumpError
from regress.printed import printable

Row = dict[str, Any]

_SAMPLES = 50  # rows of a trajectory table


def directory_rows(folder: str | Location) -> list[Row]:
    """Return one row for each sub-folder with records, or for the folder itself: its steps, ranks, files, bytes."""
    groups: dict[str, list[Location]] = {}
    here = children(location(folder).absolute())
    below = [path for sub in here if sub.is_dir() for path in children(sub)]
    for path in (*here, *below):
        if is_dump_file(path):
            groups.setdefault(path.parent.name, []).append(path)
    order = {stage.name: index for index, stage in enumerate(STAGES)}
    return [_group_row(name, groups[name]) for name in sorted(groups, key=lambda n: (order.get(n, -1), n))]


def _group_row(name: str, paths: list[Location]) -> Row:
    places = [place for path in paths if (place := parse_stem(path.stem)) is not None]
    return {
        "type": name,
        "format": "+".join(sorted({path.suffix.removeprefix(".") for path in paths})),
        **{
            f"{key}s": spans(value for place in places if (value := getattr(place, key)) is not None)
            for key in ("step", "update", "rank", "micro")
        },
        "files": len(paths),
        "bytes": sum(size(path) for path in paths),
    }


def spans(numbers: Iterable[int]) -> str:
    """Format numbers in short: `0-3 7`."""
    found = sorted(set(numbers))
    starts = [n for n in found if n - 1 not in found]
    ends = [n for n in found if n + 1 not in found]
    return " ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def tensor_rows(record: Record) -> list[Row]:
    """Return one row for each tensor; min, max, mean and norm are over its finite values."""
    return [{"tensor": name, **_statistics(array)} for name, array in record.tensors.items()]


def _statistics(array: Array) -> Row:
    row: Row = {"dtype": dtype_name(array.dtype), "shape": list(array.shape)}
    with np.errstate(all="ignore"):  # sums of huge values overflow to infinity, which is the answer
        values = array.astype(np.float64) if is_float(array.dtype) else array
        finite = values[np.isfinite(values)]
        wide = finite.astype(np.float64)
        return row | {
            "min": finite.min().item() if finite.size else None,
            "max": finite.max().item() if finite.size else None,
            "mean": float(wide.mean()) if finite.size else None,
            "norm": float(np.sqrt((wide**2).sum())),
            "nan": int(np.isnan(values).sum()),
            "inf": int(np.isinf(values).sum()),
        }


def trajectory_rows(trajectories: Iterable[Trajectory]) -> list[Row]:
    """Return one row for each sample."""
    return [
        {
            "group_id": t.group_id,
            "run_id": t.run_id,
            "val": t.is_val,
            "tokens": len(t.tokens),
            "prompt": t.prompt_length,
            "trained": sum(t.loss_mask),
            "reward": t.reward,
            "log_probs": None if t.log_probs is None else float(t.log_probs.astype(np.float64).sum()),
            "finish": t.finish_reason,
            "response": t.response,
        }
        for t in trajectories
    ]


def render(path: str | Location) -> RenderableType:
    """Return tables of a dump directory, one of its folders, or a file; raises `DumpError` for anything else."""
    path = location(path)
    if not path.is_dir():
        return Group(*(_render_record(record) for record in read_all(path)))
    rows = directory_rows(path)
    if not rows:
        raise DumpError(
            f"{path} holds no dump: give a dump directory, a folder of step_* files, or one such file"
        )
    return Group(_state(path), _table(rows))


def _state(folder: Location) -> Text:
    """Return the state of a dump, complete or not verified, and its settings."""
    folder = folder.absolute()
    part = not (folder / MANIFEST).exists() and (folder.parent / MANIFEST).exists()
    try:
        reader = DumpReader(folder.parent, only=folder.name) if part else DumpReader(folder)
    except DumpError as error:
        return Text(f"not verified: {error}", style="yellow")
    told = reader.manifest.provenance
    settings = {**told.versions, **told.environment.get("variables", {})}
    state = f"complete: {len(reader.names())} {reader.manifest.format} files as listed in {MANIFEST}"
    return Text(state + "\n" + printable(", ".join(f"{name} {value}" for name, value in settings.items())))


def _render_record(record: Record) -> RenderableType:
    place = " ".join(f"{key} {value}" for key, value in vars(record.where).items() if value is not None)
    parts: list[RenderableType] = [Text(f"{record.type}: {place}", style="bold")]
    meta = dict(record.meta)
    if record.type == "trajectory":
        rows = trajectory_rows(from_record(record))
        parts.append(_table(rows[:_SAMPLES]))
        if len(rows) > _SAMPLES:
            parts.append(Text(f"... and {len(rows) - _SAMPLES} more samples"))
        del meta["samples"]
    else:
        parts.append(_table(tensor_rows(record)))
    parts += [Text(f"{key}: {_short(tag_floats(value))}") for key, value in meta.items()]
    return Group(*parts)


def _table(rows: list[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for key in rows[0] if rows else ():
        numeric = all(row[key] is None or isinstance(row[key], int | float) for row in rows)
        table.add_column(key, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    return table


def _cell(value: Any) -> Text:
    if value is None:
        return Text("-")
    return Text(f"{value:.5g}" if isinstance(value, float) else _printable(str(value)))


def _short(value: Any, limit: int = 300) -> str:
    text = _printable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    return text if len(text) <= limit else f"{text[:limit]} ..."


def _printable(text: str) -> str:
    """Return recorded text on one line, without control sequences, which must not reach the terminal."""
    return text if text.isprintable() else printable(repr(text))
