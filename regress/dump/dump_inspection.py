"""Inspection of dumps: plain rows for programs, tables for a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from regress.credential_redaction import redacted
from regress.dump.canonical_json import strict, tag_floats
from regress.dump.coordinates import parse_stem
from regress.dump.dump_location import Location, children, location, size
from regress.dump.dump_manifest import MANIFEST, dump_inside
from regress.dump.dump_reader import DumpReader, is_dump_file, read_all
from regress.dump.numpy_arrays import Array, dtype_name, is_float
from regress.dump.record import Record
from regress.dump.record_types import RECORD_TYPES
from regress.dump.trajectory import Trajectory, from_record
from regress.errors import DumpError
from regress.printable_text import printable, printable_tree

Row = dict[str, Any]

SCHEMA_VERSION = 1
COMPLETE = "complete: "
"""Beginning of the state of a dump that holds all that its manifest lists."""
_SAMPLES = 50  # rows of a trajectory table


def directory_rows(folder: str | Location) -> list[Row]:
    """Return one row for each sub-folder with records, or for the folder itself: its steps, ranks, files, bytes."""
    groups: dict[str, list[Location]] = {}
    here = children(location(folder).absolute())
    below = [path for sub in here if sub.is_dir() for path in children(sub)]
    for path in (*here, *below):
        if is_dump_file(path):
            groups.setdefault(path.parent.name, []).append(path)
    order = {record_type.name: index for index, record_type in enumerate(RECORD_TYPES)}
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


@dataclass(frozen=True)
class Shown:
    """A dump directory, one of its folders, or a file, for people and for programs.

    Attributes:
        path: as it was given.
        rows: one for each type of record in a directory; empty for a file.
        records: those of a file; empty for a directory.
        state: whether a directory is complete, or why it is not verified; empty for a file.
        settings: versions and variables of the run that recorded it.
        error: why nothing can be shown, as `RegressError.to_json` tells it.
    """

    path: str
    rows: Sequence[Row] = ()
    records: Sequence[Record] = ()
    state: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    error: Mapping[str, str] | None = None

    def table(self) -> RenderableType:
        """Return tables for a terminal."""
        if self.records:
            return Group(*(_render_record(record) for record in self.records))
        words = printable(", ".join(f"{name} {value}" for name, value in self.settings.items()))
        verified = self.state.startswith(COMPLETE)
        state = Text(f"{self.state}\n{words}") if verified else Text(self.state, style="yellow")
        return Group(state, _table([*self.rows]))

    def dumps(self) -> str:
        """Return strict JSON, as docs/reference/report.md says; floats that are not finite are tagged."""
        tree = {
            "schema_version": SCHEMA_VERSION,
            "path": redacted(self.path),
            "exit_code": 2 if self.error else 0,
            "error": self.error,
            "state": self.state,
            "settings": {str(name): str(value) for name, value in self.settings.items()},
            "types": [*self.rows],
            "records": [_record_json(record) for record in self.records],
        }
        return json.dumps(printable_tree(strict(tree, "show")), indent=1, allow_nan=False) + "\n"


def _record_json(record: Record) -> dict[str, Any]:
    meta = dict(record.meta)
    rows: dict[str, list[Row]] = {"tensors": [], "samples": []}
    if record.type == "trajectory":
        rows["samples"] = trajectory_rows(from_record(record))
        del meta["samples"]
    else:
        rows["tensors"] = tensor_rows(record)
    return {"type": record.type, **vars(record.where), "meta": meta, **rows}


def render(path: str | Location) -> RenderableType:
    """Return tables of a dump directory, one of its folders, or a file; raises `DumpError` for anything else."""
    return inspected(path).table()


def inspected(path: str | Location) -> Shown:
    """Read a dump directory, one of its folders, or a file; raises `DumpError` for anything else."""
    place, path = location(path), str(path)
    if not place.is_dir():
        return Shown(path, records=read_all(place))
    rows = directory_rows(place)
    if not rows:
        inside = dump_inside(place)
        given = (
            f"{inside}, the dump inside of it"
            if inside
            else "a dump directory, a folder of step_* files, or one such file"
        )
        raise DumpError(f"{place} holds no dump: give {given}")
    return Shown(path, rows, (), *_state(place))


def _state(folder: Location) -> tuple[str, dict[str, Any]]:
    """Return the state of a dump, complete or not verified, and its settings."""
    folder = folder.absolute()
    part = not (folder / MANIFEST).exists() and (folder.parent / MANIFEST).exists()
    try:
        reader = DumpReader(folder.parent, only=folder.name) if part else DumpReader(folder)
    except DumpError as error:
        return f"not verified: {error}", {}
    provenance = reader.manifest.provenance
    settings = {**provenance.versions, **provenance.environment.get("variables", {})}
    return f"{COMPLETE}{len(reader.names())} {reader.manifest.format} files as listed in {MANIFEST}", settings


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
