"""A plant begins before a system is prepared, or afterwards if it takes the system, and ends with the cell."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from regress.errors import SystemsError
from regress.systems import cell_worker
from regress.systems.cell_worker import Job, run_rank
from regress.systems.conformance_row import ConformanceRow, Result
from regress.systems.conformance_table import line_of
from regress.systems.protocol import Cell, Engaged, Layout, System

CELL = Cell(Layout("padded"), "sft")
told: list[str] = []


class Noted(System):
    name, version_of = "noted", "torch"

    def cells(self) -> list[Cell]:
        return [CELL]

    def objective(self, cell: Cell) -> dict[str, Any]:
        return {}

    def prepare(self, *_: Any) -> None:
        told.append("prepare")

    def step(self) -> None:
        told.append("step")

    def engaged(self) -> Engaged:
        return Engaged()

    def close(self) -> None:
        told.append("close")


@contextmanager
def early() -> Iterator[None]:
    told.append("begin")
    yield
    told.append("end")


@contextmanager
def late(system: Noted) -> Iterator[None]:
    told.append(f"begin {system.name}")
    yield
    told.append("end")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    told.clear()
    monkeypatch.setitem(sys.modules, "planting", sys.modules[__name__])
    monkeypatch.setattr(cell_worker, "ExportedCase", lambda folder: folder)


def job(plant: str) -> Job:
    return Job("planting:Noted", CELL.to_json(), "export", "dump", plant)


@pytest.mark.parametrize(
    ("plant", "order"),
    [
        ("", ["prepare", "step", "close"]),
        ("planting:early", ["begin", "prepare", "step", "close", "end"]),
        ("planting:late", ["prepare", "begin noted", "step", "end", "close"]),
    ],
)
def test_a_plant_is_there_while_the_system_steps(plant: str, order: list[str]) -> None:
    run_rank(job(plant))
    assert told == order


def test_a_plant_that_is_not_there_is_named() -> None:
    with pytest.raises(
        SystemsError, match=r"nothing to plant at planting:nowhere: write package\.module:function"
    ):
        run_rank(job("planting:nowhere"))
    assert told == []


def test_a_row_tells_its_plant() -> None:
    row = ConformanceRow("noted", "1.0", CELL, Result.EXACT, plant="planting:late")
    assert line_of(row) == "noted 1.0 padded/sft/dense with planting:late: exact"
    assert ConformanceRow.from_json(row.to_json()).plant == row.plant
