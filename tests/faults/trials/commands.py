"""Commands of the corpus of faults: what is in it, and what the harness makes of each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from regress.choice_option import Choice
from regress.command_group import FriendlyGroup
from regress.dump.command_outputs import Output, OutputFile, OutputFolder, write_output
from regress.dump.dump_location import Location
from regress.golden.golden_directory import open_store
from regress.golden.golden_options import code_option, directory_option
from regress.printable_text import echo
from regress.progress_bar import progress

if TYPE_CHECKING:
    from regress.golden.golden_directory import GoldenStore
    from tests.faults.fault import Fault
    from tests.faults.trials.rows import FaultRow
    from tests.faults.trials.trial import Trial

_WIDTH = 170  # columns of a table where there is no terminal
PARTS = ("all", "tuning", "held-out")
KINDS = ("semantic", "precision", "equivalent", "harmless")
LETTERS = tuple("ABCDEFGHIJKLMNOPQRSTUV")
"""Kinds and categories of the corpus, which loads torch."""


@click.group(cls=FriendlyGroup)
def faults() -> None:
    """List faults, and inject them.

    A fault is a bug of a real training system, in a line or two: the harness has to catch it, to say where it begins
    and to name it. Refactorings and faults that change nothing are there, too, and must not be flagged.
    """


@faults.command("list")
@click.argument("names", nargs=-1, metavar="[NAME|GLOB]...")
@click.option("--kind", type=Choice(KINDS), help="Only those of a kind.")
@click.option(
    "--category",
    type=Choice(LETTERS),
    metavar="LETTER",
    help=f"Only those of a category: A to {LETTERS[-1]}.",
)
def list_faults(names: tuple[str, ...], kind: str | None, category: str | None) -> None:
    """List the faults of the corpus.

    \b
    python -m tests.faults list
    python -m tests.faults list 'clip*'
    python -m tests.faults list --kind precision
    """
    from tests.faults.fault import CATEGORIES

    chosen = [one for one in _chosen(names) if kind in (None, one.kind) and category in (None, one.category)]
    found = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title in ("fault", "kind", "category", "shows in", "first divergence"):
        found.add_column(title, overflow="fold")
    for one in chosen:
        where = ", ".join(f"{shown.case}/{shown.variant}" for shown in one.shown)
        cells = one.name, one.kind, CATEGORIES[one.category], where, one.shown[0].first
        found.add_row(*(Text(cell) for cell in cells))
    _wide().print(found)
    echo(f"{len(chosen)} faults")


@faults.command()
@click.argument("name")
def show(name: str) -> None:
    """Show what is known of a fault.

    \b
    python -m tests.faults show mean_of_means
    """
    from tests.faults.fault import CATEGORIES, COMMON, KINDS
    from tests.faults.registry import fault_named

    one = fault_named(name)
    told = {
        "title": one.title,
        "category": CATEGORIES[one.category],
        "kind": f"{one.kind}: {KINDS[one.kind]}",
        "met in": one.source,
        "mechanism": one.mechanism,
        "proof": one.proof,
        "diagnosis": ", ".join(one.rules) or ("silence" if one.wrong else ""),
        "blind": ", ".join(COMMON[check] for check in one.blind),
        "part": ("held-out" if one.held_out else "tuning") if one.wrong else "",
        "code": f"{one.inject.__module__}.{one.name}",
    }
    echo(name)
    for key, text in told.items():
        if text:
            echo(f"  {key + ':':<12}{text}")
    for shown in one.shown:
        which = f", ranks {', '.join(map(str, shown.ranks))}" if shown.ranks else ""
        verb = f"shows in {shown.first}" if one.wrong else "is tried"
        echo(f"  {shown.case}/{shown.variant}: {verb}{which} ({', '.join(one.precisions)})")
    for where, why in one.silent.items():
        echo(f"  {where}: cannot show: {why}")


@faults.command()
@click.argument("names", nargs=-1, metavar="[NAME|GLOB]...")
@click.option("--kind", type=Choice(KINDS), help="Only those of a kind.")
@click.option("--case", metavar="NAME", help="Replay this golden case instead of those in which they show.")
@click.option("--variant", metavar="NAME", help="Replay under this variant instead.")
@click.option(
    "--part",
    type=Choice(PARTS),
    default="all",
    show_default=True,
    help="A third of the faults is held out, by a hash of the name, to judge diagnoses by.",
)
@click.option("--diagnosis/--no-diagnosis", default=True, show_default=True, help="Diagnose, and score it.")
@click.option(
    "--hidden", is_flag=True, help="Diagnose as if no dump told its configuration, as most foreign ones."
)
@click.option(
    "--report", type=OutputFolder(), metavar="DIR|URL", help="Write faults.json, .html, .txt there."
)
@click.option(
    "--matrix", type=OutputFile(), metavar="FILE|URL|-", help="Write faults and checks as Markdown."
)
@directory_option
@code_option
@click.pass_context
def run(
    ctx: click.Context,
    names: tuple[str, ...],
    kind: str | None,
    case: str | None,
    variant: str | None,
    part: str,
    diagnosis: bool,
    hidden: bool,
    report: Location | None,
    matrix: Output | None,
    golden_dir: Path | None,
) -> None:
    """Inject faults, and tell what is noticed of them.

    \b
    python -m tests.faults run                                   all of them, each where it shows
    python -m tests.faults run mean_of_means 'clip*'
    python -m tests.faults run mean_of_means --case dapo --variant mbs4
    python -m tests.faults run --report outputs/faults --matrix docs/kill-matrix.md

    Exit codes: 0 all caught and nothing else flagged, 1 a fault escaped or a refactoring was flagged.
    """
    from tests.faults.fault import CATEGORIES, COMMON
    from tests.faults.trials.report import markdown, summary, table, write
    from tests.faults.trials.rows import score
    from tests.faults.trials.trial import trials_of

    chosen = [
        one
        for one in _chosen(names)
        if kind in (None, one.kind)
        and (part == "all" or (one.wrong and one.held_out == (part == "held-out")))
    ]
    rows = _tried([*trials_of(chosen, case, variant)], open_store(golden_dir), diagnosis, hidden)
    _wide().print(table(rows))
    found = score(rows)
    for line in summary(found, COMMON):
        echo(line)
    for path in write(report, rows, COMMON) if report is not None else []:
        echo(f"written: {path}")
    if matrix is not None:
        write_output(matrix, markdown(rows, COMMON, CATEGORIES))
    ctx.exit(found.exit_code)


@faults.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--steps", type=click.IntRange(11), default=50, show_default=True, help="Steps of a training.")
@click.option("--seeds", type=click.IntRange(1), default=3, show_default=True, help="Trainings with a fault.")
@click.option(
    "--healthy", type=click.IntRange(2), default=5, show_default=True, help="Trainings without one."
)
@click.option("--out", type=OutputFile(), required=True, metavar="FILE", help="Keeps the curves, as JSON.")
def curves(names: tuple[str, ...], steps: int, seeds: int, healthy: int, out: Output) -> None:
    """Train with faults, and tell whose reward curve differs.

    A fault is noticed if its last ten steps have a mean reward outside of the range of the healthy seeds. Twenty faults
    are tried by default. The file keeps every curve as soon as it is drawn; a second call goes on.

    \b
    python -m tests.faults curves --out outputs/curves.json
    python -m tests.faults curves mean_of_means kl_detached --steps 30 --out outputs/curves.json
    """
    from tests.faults.trials.curves import NAMED, drawn, verdicts

    chosen = [one.name for one in _chosen(names)] if names else [*NAMED]
    with progress(total=healthy + seeds * len(chosen)) as bar:

        def advance(name: str) -> None:
            bar.name(name)
            bar.advance()

        found = drawn(chosen, out, steps=steps, seeds=seeds, healthy=healthy, advance=advance)
    told = [one for one in verdicts(found) if one.fault in chosen]
    for one in told:
        verb = "noticed" if one.noticed else "not noticed"
        echo(f"{one.fault}: {verb}, ends at {one.end:.3f} (healthy {one.low:.3f} to {one.high:.3f})")
    echo(f"{sum(one.noticed for one in told)} of {len(told)} faults noticed; written: {out}")


@faults.command("matrix")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--out", type=OutputFile(), required=True, metavar="FILE", help="The page.")
@click.option(
    "--curves",
    "drawn_before",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="Reward curves of python -m tests.faults curves, for the page.",
)
def kill_matrix(runs: tuple[Path, ...], out: Output, drawn_before: Path | None) -> None:
    """Write the page of runs that were made before, from their faults.json.

    \b
    python -m tests.faults matrix outputs/faults/faults.json --out docs/kill-matrix.md

    Of a replay that is in several, the last counts.
    """
    from tests.faults.fault import CATEGORIES, COMMON
    from tests.faults.trials.report import markdown
    from tests.faults.trials.rows import read_fault_rows

    rows = {row.name: row for path in runs for row in read_fault_rows(path)}
    ordered = sorted(rows.values(), key=lambda row: (row.category, row.fault))
    told: list[tuple[str, float, float, float, bool]] = []
    if drawn_before is not None:
        from tests.faults.trials.curves import read, verdicts

        found = verdicts(read(drawn_before))
        told = [(one.fault, one.end, one.low, one.high, one.noticed) for one in found]
    write_output(out, markdown(ordered, COMMON, CATEGORIES, told))


def _chosen(names: Sequence[str]) -> list[Fault]:
    from tests.faults.registry import faults_named

    return faults_named(names)


def _tried(trials: Sequence[Trial], store: GoldenStore, diagnosed: bool, hidden: bool) -> list[FaultRow]:
    from regress.replay.replay_pool import close_shared_pool, shared_pool
    from tests.faults.trials.trial import tried

    rows = []
    shared_pool().warm()
    try:
        with progress(total=len(trials)) as bar:
            for one in trials:
                bar.name(one.name)
                rows.append(tried(one, store, diagnosed=diagnosed, hidden=hidden))
                bar.advance()
    finally:
        close_shared_pool()
    return rows


def _wide() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, _WIDTH))
