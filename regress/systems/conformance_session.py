"""A run of the table as the command line asks for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from regress.dump.command_outputs import Output, StandardOutput, write_output
from regress.errors import SystemsError, meant
from regress.golden.golden_directory import open_store
from regress.systems.conformance_row import RED, ConformanceRow
from regress.systems.conformance_run import Workspace, chosen, run_system
from regress.systems.conformance_table import exit_code, read_rows, text_of, together, write_rows
from regress.systems.known_findings import marked
from regress.systems.protocol import SystemUnderTest
from regress.systems.system_environments import environment_of, shared_size
from regress.systems.system_registry import load, location_of, locations


def _check_patterns(known: Mapping[str, SystemUnderTest], patterns: Sequence[str]) -> None:
    if patterns and not any(chosen(system, patterns) for system in known.values()):
        cells = [cell.name for system in known.values() for cell in system.cells()]
        near = next(filter(None, (meant(pattern, cells) for pattern in patterns)), "")
        raise SystemsError(
            f"{near}no cell of {', '.join(known)} matches {', '.join(patterns)}: see regress systems list NAME"
        )


def _folder(keep: Path | None, resources: ExitStack) -> Path:
    if keep is not None and keep.is_dir() and any(keep.iterdir()):
        raise SystemsError(f"{keep} is not empty: give --keep a folder that does not exist yet")
    return keep or Path(resources.enter_context(TemporaryDirectory(prefix="regress-systems-")))


def run_systems(
    names: Sequence[str],
    *,
    patterns: Sequence[str] = (),
    newest: bool = False,
    json_file: Output | None = None,
    resume: bool = False,
    report: Output | None = None,
    keep: Path | None = None,
    plant: str = "",
    timeout: float = 300.0,
    golden_dir: Path | None = None,
    echo: Callable[[str], object] = print,
) -> int:
    """Run cells of systems and tell each row as it comes; return the exit code of the command.

    Args:
        json_file: written after each cell.
        resume: keep the rows that the file holds, and leave out cells that were judged in the same environment.

    Raises:
        RegressError: if a system is not known or not installed, or nothing matches.
    """
    from regress.systems.conformance_page import page_of

    known = {name: load(location_of(name)) for name in names or locations()}
    _check_patterns(known, patterns)
    rows = _kept(json_file, resume, known)

    def tell(row: ConformanceRow) -> None:
        rows[:] = together([*rows, row])
        if json_file is not None:
            write_rows(json_file, rows)
        for line in [*text_of([row])][:-1]:
            echo(line)

    environments = {name: environment_of(system, newest=newest) for name, system in known.items()}
    with ExitStack() as resources:
        workspace = Workspace(_folder(keep, resources).absolute(), open_store(golden_dir))
        for name, environment in environments.items():
            run_system(
                name,
                workspace,
                environment=environment,
                patterns=patterns,
                leave_out=_done(rows, known[name].name, "" if plant else environment.stamp),
                plant=plant,
                paths=(os.getcwd(),),  # noqa: PTH109  # adapters and plants of one's own
                timeout=timeout,
                on_row=tell,
            )
    for line in list(text_of(rows))[-1:]:
        echo(line)
    if json_file is not None:
        write_rows(json_file, rows)
        echo(f"written: {json_file}")
    if report is not None:
        write_output(report, page_of(rows, known.values(), shared_size()))
    return exit_code(rows)


def _kept(
    json_file: Output | None, resume: bool, known: Mapping[str, SystemUnderTest]
) -> list[ConformanceRow]:
    """Return the rows that a resumed run goes on from, without cells that the systems do not have any more."""
    if not resume:
        return []
    if json_file is None or isinstance(json_file, StandardOutput):
        raise SystemsError("--resume goes on from the rows of a file: name it with --json")
    cells = {(one.name, cell.name) for one in known.values() for cell in one.cells()}
    names = {one.name for one in known.values()}
    found = read_rows(json_file) if json_file.exists() else []
    return [marked(r) for r in found if r.system not in names or (r.system, r.cell.name) in cells]


def _done(rows: Sequence[ConformanceRow], system: str, stamp: str) -> set[str]:
    """Return the cells of a system that were judged in this environment; red ones of no finding are tried again."""
    own = [row for row in rows if row.system == system and row.stamp == stamp != ""]
    return {row.cell.identity for row in own if row.known or row.result not in RED}
