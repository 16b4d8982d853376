"""Run of the table: cells of systems, their truth, the judgement of each."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from regress.dump.dump_reader import DumpReader
from regress.errors import RegressError, SystemsError
from regress.explain.explanation import explain_update
from regress.explain.update_tokens import UpdateTokens, read_update
from regress.golden.golden_directory import GoldenStore
from regress.replay.exported_case import ExportedCase, Sample
from regress.systems.cell_judge import judge
from regress.systems.cell_launch import TIMEOUT, Outcome, run_jobs
from regress.systems.cell_worker import Job
from regress.systems.conformance_row import ConformanceRow, Result
from regress.systems.known_findings import marked
from regress.systems.protocol import Cell, SystemUnderTest
from regress.systems.system_environments import Environment
from regress.systems.system_registry import load, location_of

OnRow = Callable[[ConformanceRow], None]


@dataclass
class Workspace:
    """Exports, truths and dumps of a run, below one folder.

    Attributes:
        folder: kept or not, as the caller decides.
        store: the golden cases.
    """

    folder: Path
    store: GoldenStore
    _exports: dict[str, Path] = field(default_factory=dict)
    _truths: dict[str, Path] = field(default_factory=dict)

    def export(self, case: str, batches: Sequence[int] = (), without: Sequence[int] = ()) -> Path:
        """Return the folder of an exported case, cut into other batches if asked for, written once."""
        from regress.replay.case_export import export_case
        from regress.systems.rebatched_case import recut

        name = "-".join([case, *map(str, batches), *(f"without{token}" for token in without)])
        if name not in self._exports:
            folder = self.folder / "exports" / name
            self._exports[name] = (
                recut(self.export(case), batches, folder, without)
                if batches
                else export_case(self.store.case(case), folder)
            )
        return self._exports[name]

    def truth(self, cell: Cell, objective: Mapping[str, Any]) -> Path:
        """Return the dump of the truth of a cell under an objective, computed once."""

        facts = [cell.case, cell.batches, cell.without, cell.updates, cell.warm, objective]
        key = json.dumps(facts, sort_keys=True, default=str)
        name = sha256(key.encode()).hexdigest()[:16]
        if name not in self._truths:
            folder = self.folder / "truths" / name
            self._truths[name] = truth(
                self.export(cell.case, cell.batches, cell.without),
                objective,
                cell.updates,
                folder,
                warm=cell.warm,
            )
        return self._truths[name]


def chosen(system: SystemUnderTest, patterns: Sequence[str] = ()) -> list[Cell]:
    """Return the cells whose names match one of the patterns; all without any.

    Raises:
        SystemsError: if a pattern matches none, or two cells have one name.
    """
    cells = list(system.cells())
    names = [cell.name for cell in cells]
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if twice:
        raise SystemsError(
            f"{system.name} has two cells called {twice[0]}: give their layouts names of their own"
        )
    if not patterns:
        return cells
    return [cell for cell in cells if any(fnmatchcase(cell.name, pattern) for pattern in patterns)]


def run_system(
    name: str,
    workspace: Workspace,
    *,
    environment: Environment,
    patterns: Sequence[str] = (),
    leave_out: Collection[str] = (),
    plant: str = "",
    paths: Sequence[str] = (),
    timeout: float = TIMEOUT,
    on_row: OnRow = lambda _: None,
) -> list[ConformanceRow]:
    """Run the cells of a system and judge each as soon as it is done.

    Args:
        name: registered name, or ``module:Class``.
        environment: Python that has the system.
        patterns: of the names of cells; all by default.
        leave_out: `Cell.identity` of cells that are not run again.
        plant: ``module:function`` of a context manager around each cell, which changes the system.
        paths: folders from which the adapter and the plant are imported besides.
        on_row: called with each row.

    Raises:
        RegressError: if the environment, a case or an objective is impossible; a cell that fails is a row.
    """
    cells = chosen(load(location_of(name)), patterns)
    tasks = [(cell, plant) for cell in cells if cell.identity not in leave_out]
    return run_cells(
        name, workspace, tasks, environment=environment, paths=paths, timeout=timeout, on_row=on_row
    )


def run_cells(
    name: str,
    workspace: Workspace,
    tasks: Sequence[tuple[Cell, str]],
    *,
    environment: Environment,
    paths: Sequence[str] = (),
    timeout: float = TIMEOUT,
    on_row: OnRow = lambda _: None,
) -> list[ConformanceRow]:
    """Run cells of a system, each with a plant of its own or none, and judge each as soon as it is done.

    Args:
        tasks: cells, and their plants as ``module:function``; empty for none.

    Raises:
        RegressError: as `run_system` does.
    """
    location = location_of(name)
    system = load(location)
    folder = workspace.folder / system.name
    jobs, dumps = [], []
    for number, (cell, plant) in enumerate(tasks):
        dumps.append(folder / f"cell{number:03d}" / "dump")
        export = str(workspace.export(cell.case, cell.batches, cell.without))
        job = Job(location, cell.to_json(), export, str(dumps[-1]), plant, tuple(paths))
        jobs.append((job, cell.layout.ranks))
    rows: list[ConformanceRow] = []

    def done(number: int, outcome: Outcome) -> None:
        cell, plant = tasks[number]
        row = replace(row_of(system, cell, outcome, dumps[number], workspace), plant=plant)
        rows.append(marked(replace(row, stamp="" if plant else environment.stamp, disk=environment.size)))
        on_row(rows[-1])

    if jobs:
        run_jobs(
            environment.python,
            jobs,
            folder,
            modules=system.modules,
            environ={**environment.variables, **system.environ},
            timeout=timeout,
            on_outcome=done,
        )
    return rows


def row_of(
    system: SystemUnderTest, cell: Cell, outcome: Outcome, dump: Path, workspace: Workspace
) -> ConformanceRow:
    """Return the row of a cell that was carried, or failed."""
    claimed = dict(system.objective(cell))
    common: dict[str, Any] = {
        "system": system.name,
        "version": outcome.versions.get(system.version_of, ""),
        "cell": cell,
        "claimed": claimed,
        "facts": outcome.facts,
        "shims": _shims(system, cell),
        "versions": outcome.versions,
    }
    if outcome.error:
        return ConformanceRow(result=Result.ERROR, told=outcome.error, notes=outcome.notes, **common)
    if outcome.missing:
        return ConformanceRow(result=Result.ERROR, told=f"the layout is not on: {outcome.missing}", **common)
    from regress.replay.exported_case import ExportedCase

    try:
        truth = workspace.truth(cell, claimed)
        found = judge(truth, dump, cell.declared, cell.precision)
    except RegressError as error:
        return ConformanceRow(result=Result.ERROR, told=str(error), **common)
    shown = explained(dump, ExportedCase(workspace.export(cell.case, cell.batches, cell.without)), claimed)
    judged: dict[str, Any] = {
        "told": found.told,
        "first": found.first,
        "cause": found.cause,
        "listed": found.listed,
    }
    return ConformanceRow(result=found.result, errors=found.errors, explained=shown, **judged, **common)


def _shims(system: SystemUnderTest, cell: Cell) -> list[str]:
    """Return the titles of the shims of a cell, those that touch numerics marked."""
    own = [
        shim
        for shim in system.shims
        if any(fnmatchcase(cell.layout.name, pattern) for pattern in shim.layouts)
    ]
    return [f"{'!' if shim.touches_numerics else ''}{shim.title}" for shim in own]


WHOLE: Mapping[str, Any] = {"trainer.epochs": 1, "trainer.mini_batch_size": None}
"""A released trainer makes one update of each recorded rollout batch, unless the adapter says otherwise."""


def truth(
    export: Path, objective: Mapping[str, Any], updates: int, folder: Path, *, warm: bool = False
) -> Path:
    """Compute updates of an exported case under another objective, unpadded, on one process, in true float64.

    Args:
        objective: overrides as `regress.oracle.truth` takes them.
        updates: number of optimizer updates, from the first.
        folder: new, for the dump.
        warm: begin with the optimizer's state of the case; a released trainer starts its own.

    Returns:
        The folder of the dump.

    Raises:
        RegressError: if the export is damaged or the objective impossible.
    """
    from regress.oracle.exported_truth import program_of
    from regress.oracle.float64_engine import run_program
    from regress.replay.exported_case import ExportedCase

    program = program_of(ExportedCase(export), {**WHOLE, **objective}, updates, folder)
    return run_program(program if warm else replace(program, state=None))


def explained(dump: Path, case: ExportedCase, claimed: Mapping[str, Any]) -> dict[str, str]:
    """Return what the first recorded step really did, by subject; empty where its dump does not tell.

    Args:
        claimed: what the system was told, as keys of the engine's configuration: with old log-probs of the sampler it
            was given the recorded ones.
    """
    try:
        rollouts = [sample.trajectory for sample in case.steps[0]]
        update = read_update(DumpReader(str(dump)), 0, rollouts=rollouts)
        if claimed.get("algorithm.old_log_probs") == "sampler":
            _give(update, "old_log_probs", case.steps[0], [sample.sampler for sample in case.steps[0]])
        if claimed.get("algorithm.kl_coef"):
            _give(update, "ref_log_probs", case.steps[0], [sample.reference for sample in case.steps[0]])
        found = explain_update(str(dump), update)
    except RegressError:
        return {}
    return {statement.subject: statement.text for statement in found.statements}


def _give(
    update: UpdateTokens,
    name: str,
    samples: Sequence[Sample],
    values: Sequence[Sequence[float | None] | None],
) -> None:
    """Add recorded log-probs that the system was given, unless its dump has them."""
    key = f"{name}/{name}"
    if update.get(f"is_loss_debug/{name}", key) is not None:
        return
    found = np.full(update.frame.size, np.nan)
    for number, index in enumerate(update.rollout.tolist()):
        given = None if index < 0 else values[index]
        if given is None:
            continue
        start = int(update.frame.offsets[number]) + len(samples[index].prompt)
        own = np.array([np.nan if value is None else value for value in given])
        found[start : start + len(own)] = own
    update.values[key] = found
