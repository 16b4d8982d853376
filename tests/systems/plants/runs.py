"""Cells of a system with their plants, in one process of its environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from plants.catalogue import Plant
from regress.golden.golden_directory import GoldenStore
from regress.systems.conformance_row import ConformanceRow
from regress.systems.conformance_run import Workspace, chosen, run_cells
from regress.systems.system_environments import environment_of
from regress.systems.system_registry import load, location_of

ROOT = Path(__file__).parents[3]


def run(
    name: str,
    plants: Sequence[Plant],
    folder: Path,
    *,
    told: Callable[[Plant, ConformanceRow], object] = lambda *_: None,
) -> list[tuple[Plant, ConformanceRow]]:
    """Run the cells of plants in a system, and return each with its row.

    Raises:
        SystemsError: if the system is not installed, or a cell is not among its cells.
    """
    system = load(location_of(name))
    tasks = [(chosen(system, [_literal(plant.cell)])[0], plant.location) for plant in plants]
    done: list[tuple[Plant, ConformanceRow]] = []

    def tell(row: ConformanceRow) -> None:
        done.append((plants[len(done)], row))
        told(*done[-1])

    workspace = Workspace(folder, GoldenStore(ROOT / "golden"))
    run_cells(
        name,
        workspace,
        tasks,
        environment=environment_of(system),
        paths=(str(Path(__file__).parents[1]),),
        on_row=tell,
    )
    return done


def _literal(name: str) -> str:
    return name.replace("[", "[[]")
