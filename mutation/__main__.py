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

from mutation.checks import Cases, matrix
from mutation.equivalent import equivalents
from mutation.mutants import ROOT, Mutant
from mutation.page import page, table
from mutation.run import Cache, Outcome, Suite, run
from mutation.scopes import PATHS, SCOPES
from mutation.suite import Reached
from mutation.unit_tests import files
from mutation.worker import Worker
from regress.replay.variants import Extent

Found = dict[str, list[tuple[Mutant, Outcome]]]


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(SCOPES)))
@click.option("--hours", default=3.0, help="Begin no further mutant after this time.", show_default=True)
@click.option("--workers", default=2, help="Number of replays at a time.", show_default=True)
@click.option(
    "--extent",
    type=click.Choice([Extent.REDUCED, Extent.DEFAULT]),
    default=Extent.REDUCED,
    help="Part of the matrix that is replayed.",
    show_default=True,
)
@click.option(
    "--cache",
    default=ROOT / ".cache" / "mutation",
    type=click.Path(path_type=Path),
    help="Folder of outcomes and reached lines; a run that was broken off goes on from it.",
)
@click.option("--most", type=click.IntRange(1), help="Run a sample of this many mutants of each scope.")
@click.option("--replays", type=click.IntRange(1), help="Run at most this many replays of each mutant.")
@click.option("--list", "only_list", is_flag=True, help="Count the mutants and run none.")
@click.option("--out", type=click.Path(path_type=Path), help="Write all outcomes as JSON.")
@click.option("--page", "to", type=click.Path(path_type=Path), help="Write the table and its survivors here.")
def main(
    names: tuple[str, ...],
    hours: float,
    workers: int,
    extent: str,
    cache: Path,
    most: int | None,
    replays: int | None,
    only_list: bool,
    out: Path | None,
    to: Path | None,
) -> None:
    """Change one expression of the engine at a time, and replay golden cases until one fails."""
    console, until = Console(), time.time() + 3600 * hours
    if only_list:
        for name in names or SCOPES:
            console.print(f"{name}: {len(SCOPES[name].mutants())} mutants")
        return
    found = _run(names or tuple(SCOPES), Extent(extent), cache, workers, until, console, most, replays)
    console.print(table(found, equivalents()), markup=False)
    if out is not None:
        rows = {name: [asdict(outcome) for _, outcome in outcomes] for name, outcomes in found.items()}
        out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    if to is not None:
        to.write_text(page(found, equivalents()), encoding="utf-8")
    wrong = Counter(outcome.fate for outcomes in found.values() for _, outcome in outcomes)["error"]
    if wrong:
        raise click.ClickException(
            f"nothing is known about {wrong} mutants, on which the tool failed; run again"
        )


def _run(
    names: tuple[str, ...],
    extent: Extent,
    cache: Path,
    count: int,
    until: float,
    console: Console,
    most: int | None,
    most_replays: int | None,
) -> Found:
    cases = Cases()
    workers = [Worker(cases) for _ in range(count)]
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    found: Found = {}
    try:
        with Progress(*columns, console=console) as progress:
            reached = Reached(PATHS, cache, workers)
            task = progress.add_task("unit tests: reached lines", total=len(files()))
            tests, left_out = reached.tests(lambda: progress.advance(task))
            for text in left_out:
                progress.console.print(f"left out: {text}", highlight=False, markup=False)
            for name in names:
                scope = SCOPES[name]
                replays = matrix(scope.ranks, extent)
                task = progress.add_task(f"{name}: reached lines", total=len(replays))
                checks = reached.replays(replays, lambda task=task: progress.advance(task))  # type: ignore[misc]  # bound at once
                task = progress.add_task(name, total=len(scope.mutants()[:most]))
                found[name] = []
                for mutant, outcome in run(
                    scope,
                    Suite(checks, tests, most_replays),
                    Cache(cache / "outcomes.jsonl"),
                    workers,
                    until,
                    most,
                ):
                    found[name].append((mutant, outcome))
                    progress.advance(task)
                    if outcome.fate != "killed":
                        text = f"{outcome.fate}: {outcome.mutant} {outcome.why}"
                        progress.console.print(text, highlight=False, markup=False)
    finally:
        for worker in workers:
            worker.close()
    return found


if __name__ == "__main__":
    main()
