"""An update whose records are broken, and the verdicts on it; pairs of dumps on disk, of which one is changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from regress.compare.update_judge import judge_update
from regress.compare.verdicts.verdict import Verdict
from regress.dump.coordinates import Place
from regress.dump.dump_files import write_atomically
from regress.dump.dump_manifest import Entry, Manifest, Provenance, write_manifest
from regress.dump.formats import FORMATS
from regress.dump.record import Record
from regress.layout import BatchPlan
from tests.unit.compare.updates import pairs
from tests.unit.compare.updates.edits import LENGTHS, PACKED, PADDED
from tests.unit.compare.updates.pairs import Pair, Write


@pytest.fixture(params=[PADDED, PACKED], ids=["padded", "packed"])
def plan(request: pytest.FixtureRequest) -> BatchPlan:
    found: BatchPlan = request.param
    return found


@pytest.fixture
def world(make_world: Callable[..., Any]) -> Any:
    return make_world(LENGTHS, seed=1)


@pytest.fixture
def faults(world: Any, tolerances: Any) -> Callable[..., list[Verdict]]:
    """Every verdict that is not ok."""

    def of(records: Sequence[Record], plan: BatchPlan, dtype: str | None = None) -> list[Verdict]:
        verdicts = judge_update(
            records,
            world.truth,
            world.frame,
            tolerances,
            place=Place(0),
            planned=world.planned(plan),
            dtype=None if dtype is None else lambda quantity, name: dtype,
            text=lambda token: f"<{token}>",
        )
        return [v for v in verdicts if not v.ok]

    return of


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write records into a complete dump."""

    def to_folder(name: str, records: Sequence[Record], **mesh: int) -> str:
        folder, entries = tmp_path / name, {}
        for record in records:
            path = f"{record.type}/{record.where.stem}.safetensors"
            stamp = write_atomically(folder / path, FORMATS["safetensors"].encode(record))
            entries[path] = Entry(record.type, record.where, stamp)
        told = Provenance(mesh={"world_size": 1, **mesh})
        write_manifest(folder, Manifest(told, "safetensors", entries))
        return str(folder)

    return to_folder


@pytest.fixture
def pair(write: Write, make_world: Any) -> Callable[..., Pair]:
    """A healthy pair, to be changed."""
    return lambda lengths=pairs.LENGTHS, **how: Pair(write, make_world(lengths), **how)
