"""A run of the table as the command line asks for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from regress.errors import SystemsError
from regress.golden.location import open_store
from regress.systems.environments import environment_of
from regress.systems.registry import load, location_of, locations
from regress.systems.row import Row
from regress.systems.run import Workspace, chosen, run_system
from regress.systems.table import exit_code, line_of, text_of, write_rows


def run_systems(
    names: Sequence[str],
    *,
    patterns: Sequence[str] = (),
    newest: bool = False,
    json_file: Path | None = None,
    report: Path | None = None,
    keep: Path | None = None,
    plant: str = "",
    timeout: float = 300.0,
    golden_dir: Path | None = None,
    echo: Callable[[str], object] = print,
) -> int:
    """Run cells of systems and tell each row as it comes; return the exit code of the command.

    Raises:
        RegressError: if a system is not known or not installed, or nothing matches.
    """
    from regress.systems.page import page_of

    known = {name: load(location_of(name)) for name in names or locations()}
    if patterns and not any(chosen(system, patterns) for system in known.values()):
        raise SystemsError(
            f"no cell of {', '.join(known)} matches {', '.join(patterns)}: see regress systems list NAME"
        )

    def tell(row: Row) -> None:
        echo(line_of(row))

    environments = {name: environment_of(system, newest=newest) for name, system in known.items()}
    rows: list[Row] = []
    with ExitStack() as resources:
        folder = keep or Path(resources.enter_context(TemporaryDirectory(prefix="regress-systems-")))
        if keep is not None and keep.is_dir() and any(keep.iterdir()):
            raise SystemsError(f"{keep} is not empty: give --keep a folder that does not exist yet")
        workspace = Workspace(folder.absolute(), open_store(golden_dir))
        for name, environment in environments.items():
            rows += run_system(
                name,
                workspace,
                environment=environment,
                patterns=patterns,
                plant=plant,
                paths=(os.getcwd(),),  # noqa: PTH109  # adapters and plants of one's own
                timeout=timeout,
                told=tell,
            )
    for line in list(text_of(rows))[-1:]:
        echo(line)
    if json_file is not None:
        write_rows(json_file, rows)
        echo(f"written: {json_file}")
    if report is not None:
        report.write_text(page_of(rows, known.values()), encoding="utf-8")
        echo(f"written: {report}")
    return exit_code(rows)
