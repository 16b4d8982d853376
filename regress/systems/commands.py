"""``regress systems``: other people's trainers, judged."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from regress.dump.command_outputs import LocalFolder, Output, OutputFile, json_option, write_output
from regress.golden.golden_options import directory_option
from regress.printable_text import echo


@click.group()
def systems() -> None:
    """Judge released trainers by the float64 truth of a recorded batch."""
    sys.path.append(str(Path.cwd()))  # adapters of one's own


@systems.command("list")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@json_option
def list_(names: tuple[str, ...], json_file: Output | None) -> None:
    """List the systems, or the cells of some.

    \b
    regress systems list
    regress systems list trainer
    """
    from regress.systems.conformance_run import chosen
    from regress.systems.system_environments import lacking
    from regress.systems.system_registry import load, location_of, locations

    found = {}
    for name in names or locations():
        system = load(location_of(name))
        missing, cells = lacking(system.requirements), chosen(system)
        rows = [{"name": one.name, "ranks": one.layout.ranks, "updates": one.updates} for one in cells]
        found[name] = {"missing": missing, "cells": rows}
        if names:
            for cell in cells:
                echo(f"{name} {cell.name}: {cell.layout.ranks} ranks, {cell.updates} updates")
        else:
            where = f"needs {', '.join(missing)}" if missing else "runs in this Python"
            echo(f"{name}: {len(cells)} cells, {where}")
    if json_file is not None:
        write_output(json_file, json.dumps({"schema_version": 1, "systems": found}, indent=1) + "\n")


@systems.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option("--newest", is_flag=True, help="The newest releases in place of the pins.")
@click.option("--again", is_flag=True, help="Make the environment anew.")
def install(names: tuple[str, ...], newest: bool, again: bool) -> None:
    """Install the environments of systems, each a Python of its own.

    They lie in the user's cache, or in the folder that REGRESS_SYSTEMS names, and share torch with this Python.

    \b
    regress systems install deepspeed
    regress systems install deepspeed --newest
    """
    from regress.systems.system_environments import install as make
    from regress.systems.system_registry import load, location_of

    for name in names:
        made = make(load(location_of(name)), newest=newest, again=again)
        if made.folder is None:
            echo(f"{name}: nothing to install, this Python has all of it")
        else:
            echo(f"{name}: {', '.join(made.installed)} in {made.folder} ({made.size / 1e6:.0f} MB)")


@systems.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option(
    "--cell", "patterns", multiple=True, metavar="GLOB", help="Only these cells. Give it once for each."
)
@click.option("--newest", is_flag=True, help="With the newest releases in place of the pins.")
@click.option(
    "--json",
    "json_file",
    type=OutputFile(),
    help="Write the rows as JSON, as they come.",
)
@click.option("--resume", is_flag=True, help="Keep the rows of that file, and run what it lacks.")
@click.option("--report", type=OutputFile(), help="Write the table as a page.")
@click.option("--keep", type=LocalFolder(), help="Keep exports, truths and dumps here.")
@click.option(
    "--plant", default="", metavar="MODULE:FUNCTION", help="Context manager that changes the system first."
)
@click.option(
    "--timeout", type=float, default=300.0, show_default=True, help="Seconds that one cell may take."
)
@directory_option
@click.pass_context
def run(
    ctx: click.Context,
    names: tuple[str, ...],
    patterns: tuple[str, ...],
    newest: bool,
    json_file: Output | None,
    resume: bool,
    report: Output | None,
    keep: Path | None,
    plant: str,
    timeout: float,
    golden_dir: Path | None,
) -> None:
    """Run cells of systems and judge them; all systems without a name.

    \b
    regress systems run trainer
    regress systems run trainer --cell 'fsdp2*' --json rows.json
    regress systems run mypackage.system:MyTrainer
    regress systems run --json rows.json --resume

    Rows are written as they come, so an interrupted run goes on with --resume; cells are run again where they or the
    packages of the environment are others.

    Exit codes: 0 exact, as declared or wrong as a known finding says, 1 a cell is wrong, or a known finding is gone,
    2 a cell could not be judged.
    """
    from regress.systems.conformance_session import run_systems

    code = run_systems(
        names,
        patterns=patterns,
        newest=newest,
        json_file=json_file,
        resume=resume,
        report=report,
        keep=keep,
        plant=plant,
        timeout=timeout,
        golden_dir=golden_dir,
        echo=click.echo,
    )
    ctx.exit(code)


@systems.command()
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(path_type=Path, dir_okay=False), metavar="ROWS..."
)
@click.option("--report", type=OutputFile(), help="Write the table as a page.")
@click.option("--picture", type=OutputFile(), help="Draw the errors of all cells as SVG.")
@click.pass_context
def table(ctx: click.Context, files: tuple[Path, ...], report: Output | None, picture: Output | None) -> None:
    """Show rows that runs have written, together; of a cell in several files the last one.

    \b
    regress systems table trainer.json deepspeed.json --report docs/conformance.md
    regress systems table rows.json --picture docs/systems.svg

    Exit codes: 0 exact, as declared or wrong as a known finding says, 1 a cell is wrong, or a known finding is gone,
    2 a cell could not be judged.
    """
    from regress.systems.conformance_page import page_of
    from regress.systems.conformance_picture import picture_of
    from regress.systems.conformance_table import exit_code, read_rows, text_of, together
    from regress.systems.known_findings import marked
    from regress.systems.system_environments import shared_size
    from regress.systems.system_registry import load, locations

    rows = together(marked(row) for path in files for row in read_rows(path))
    for line in text_of(rows):
        echo(line)
    if report is not None:
        known = [load(location) for location in locations().values()]
        write_output(report, page_of(rows, known, shared_size()))
    if picture is not None:
        write_output(picture, picture_of(rows))
    ctx.exit(exit_code(rows))
