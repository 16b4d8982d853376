"""Command ``python -m mutation``: run the mutants of one scope or more, and print which are alive."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path

import click
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mutation.checks import Cases, Check, matrix
from mutation.equivalent import equivalents
from mutation.mutants import ROOT, Mutant
from mutation.page import page, table
from mutation.run import Cache, Outcome, Suite, run
from mutation.scopes import PATHS, SCOPES
from mutation.suite import Reached
from mutation.unit_tests import Test, files
from mutation.worker import Worker
from regress.replay.variant import Extent

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
    help="Folder of outcomes and reached lines; a run that was interrupted goes on from it.",
)
@click.option("--most", type=click.IntRange(1), help="Run a sample of this many mutants of each scope.")
@click.option("--replays", type=click.IntRange(1), help="Run at most this many replays of each mutant.")
@click.option("--ranks", default=4, help="Run replays on at most this many ranks.", show_default=True)
@click.option("--known", is_flag=True, help="Run nothing: show what the cache knows of the code as it is.")
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
    ranks: int,
    known: bool,
    only_list: bool,
    out: Path | None,
    to: Path | None,
) -> None:
    """Change one expression of the engine at a time, and replay golden cases until one fails."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave neither ranks nor files behind
    console, limits = Console(), Limits(time.time() + 3600 * hours, most, replays, ranks)
    if only_list:
        for name in names or SCOPES:
            console.print(f"{name}: {len(SCOPES[name].mutants())} mutants")
        return
    if known:
        kept = Cache(cache / "outcomes.jsonl")
        found = {name: kept.of(SCOPES[name].mutants()[:most]) for name in names or SCOPES}
    else:
        found = _run(names or tuple(SCOPES), Extent(extent), cache, workers, limits, console)
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


@dataclass(frozen=True)
class Limits:
    """Limits of a run: time as of ``time.time``, mutants of a scope, replays of a mutant, and ranks of a replay."""

    until: float
    mutants: int | None
    replays: int | None
    ranks: int


def _run(
    names: Sequence[str], extent: Extent, cache: Path, count: int, limits: Limits, console: Console
) -> Found:
    import_module("torch")  # once: threads that import it at the same time may see a part of it
    cases = Cases()
    workers = [Worker(cases) for _ in range(count)]
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console) as progress:
            reached = Reached(PATHS, cache, workers)
            tests = _tests(reached, progress)
            found: Found = {}
            for name in names:
                suite = Suite(_replays(reached, name, extent, limits.ranks, progress), tests, limits.replays)
                found[name] = list(
                    _scope(name, suite, Cache(cache / "outcomes.jsonl"), workers, limits, progress)
                )
            return found
    finally:
        for worker in workers:
            worker.close()


def _tests(reached: Reached, progress: Progress) -> list[Test]:
    task = progress.add_task("unit tests: reached lines", total=len(files()))
    tests, left_out = reached.tests(lambda: progress.advance(task))
    for text in left_out:
        progress.console.print(f"left out: {text}", highlight=False, markup=False)
    return tests


def _replays(reached: Reached, name: str, extent: Extent, ranks: int, progress: Progress) -> list[Check]:
    replays = matrix(min(SCOPES[name].ranks, ranks), extent)
    task = progress.add_task(f"{name}: reached lines", total=len(replays))
    return reached.replays(replays, lambda: progress.advance(task))


def _scope(
    name: str, suite: Suite, cache: Cache, workers: Sequence[Worker], limits: Limits, progress: Progress
) -> Iterator[tuple[Mutant, Outcome]]:
    task = progress.add_task(name, total=len(SCOPES[name].mutants()[: limits.mutants]))
    for mutant, outcome in run(SCOPES[name], suite, cache, workers, limits.until, limits.mutants):
        progress.advance(task)
        if outcome.fate != "killed":
            text = f"{outcome.fate}: {outcome.mutant} {outcome.why}"
            progress.console.print(text, highlight=False, markup=False)
        yield mutant, outcome


if __name__ == "__main__":
    main()
