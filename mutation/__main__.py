"""Command ``python -m mutation``: run the mutants of one scope or more, and print which are alive."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from mutation.checks import matrix, traced
from mutation.mutants import ROOT
from mutation.run import Cache, Outcome, run
from mutation.scopes import PATHS, SCOPES
from regress.replay.pool import close_shared_pool


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(SCOPES)))
@click.option("--hours", default=3.0, help="Begin no further mutant after this time.", show_default=True)
@click.option(
    "--cache",
    default=ROOT / ".cache" / "mutation",
    type=click.Path(path_type=Path),
    help="Folder of outcomes and reached lines; a run that was broken off goes on from it.",
)
@click.option("--list", "only_list", is_flag=True, help="Count the mutants and run none.")
@click.option("--out", type=click.Path(path_type=Path), help="Write all outcomes as JSON.")
def main(names: tuple[str, ...], hours: float, cache: Path, only_list: bool, out: Path | None) -> None:
    """Change one expression of the engine at a time, and replay golden cases until one fails."""
    console, until = Console(), time.time() + 3600 * hours
    found: dict[str, list[Outcome]] = {}
    if only_list:
        for name in names or SCOPES:
            console.print(f"{name}: {len(SCOPES[name].mutants())} mutants")
        return
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for name in names or SCOPES:
            scope = SCOPES[name]
            replays = matrix(scope.ranks, scope.extent)
            task = progress.add_task(f"{name}: reached lines", total=len(replays))
            checks = []
            for check in traced(replays, PATHS, cache):
                checks.append(check)
                progress.advance(task)
            task = progress.add_task(name, total=len(scope.mutants()))
            found[name] = []
            for outcome in run(scope, checks, Cache(cache / "outcomes.jsonl"), until):
                found[name].append(outcome)
                progress.advance(task)
                if outcome.fate != "killed":
                    progress.console.print(f"{outcome.fate}: {outcome.mutant}", highlight=False, markup=False)
    close_shared_pool()
    table = Table("scope", "mutants", "run", "killed", "alive", "unreached")
    for name, outcomes in found.items():
        fates = Counter(outcome.fate for outcome in outcomes)
        numbers = (
            len(SCOPES[name].mutants()),
            len(outcomes),
            fates["killed"],
            fates["alive"],
            fates["unreached"],
        )
        table.add_row(name, *map(str, numbers))
    console.print(table)
    if out is not None:
        rows = {name: [asdict(outcome) for outcome in outcomes] for name, outcomes in found.items()}
        out.write_text(json.dumps(rows, indent=1), encoding="utf-8")


main()
