"""Commands that run the engine on golden cases: ``regress calibrate`` and ``regress golden record``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from regress.golden.commands import directory_option, open_store
from regress.golden.names import MANIFEST
from regress.report.numbers import plural

if TYPE_CHECKING:
    from regress.replay.calibrate import Floor


@click.command()
@click.argument("case")
@directory_option
@click.option(
    "--seeds", type=click.IntRange(3), default=5, show_default=True, help="Perturbations of the weights."
)
def calibrate(case: str, golden_dir: Path | None, seeds: int) -> None:
    """Measure the tolerances of a golden case.

    \b
    regress calibrate dense

    They are written into the manifest of the case, each with what was measured and its reason.

    \b
    For each quantity and precision the noise floor is the largest of
      the response to weights that are moved by one unit in the last place,
      the error of the precision against float64,
      an eighth of the spacing of the dtype;
    the tolerance is a small multiple of it.
    """
    from regress.replay.calibrate import replays_of
    from regress.replay.record import measure

    console = Console()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task(f"calibrating {case}", total=replays_of(seeds))
        floors = measure(open_store(golden_dir), case, seeds=seeds, advance=lambda: bars.advance(task))
    console.print(_table(case, floors))


def _table(case: str, floors: list[Floor]) -> Table:
    table = Table(title=f"{case}: noise floors and tolerances, relative to the largest golden value")
    for column in ("quantity", "precision", "one ulp in the weights", "error against float64", "tolerance"):
        table.add_column(column)
    for floor in floors:
        bound = "not judged" if floor.tolerance is None else f"{floor.tolerance:.1e}"
        table.add_row(
            floor.quantity,
            str(floor.precision),
            f"{floor.perturbation:.1e}",
            f"{floor.dtype_error:.1e}",
            bound,
        )
    return table


@click.command()
@click.argument("case")
@directory_option
@click.option(
    "--inputs", is_flag=True, help="Make weights, optimizer state and rollouts again, as the recipe says."
)
def record(case: str, golden_dir: Path | None, inputs: bool) -> None:
    """Record a case as its case.yaml says.

    \b
    regress golden record mine

    Inputs (weights, optimizer state, rollouts) are made by its recipe if it has none; then the float64 values of
    every quantity are computed, twice. A case in which some faults could not show is refused. Measure its
    tolerances next: regress calibrate CASE.
    """
    from regress.replay.recipe import has_inputs
    from regress.replay.record import record as run

    store = open_store(golden_dir)
    opened = store.case(case, allow_changed_inputs=True)
    kept = has_inputs(opened) and not inputs
    written = run(store, case, inputs=inputs)
    if kept and opened.recipe:
        click.echo(f"{case}: inputs are those that were there; --inputs makes them again, as the recipe says")
    if not written:
        click.echo(f"{case}: nothing changed")
        return
    values = sum(path.name != MANIFEST for path in written)
    click.echo(f"{case}: wrote {opened.folder / MANIFEST} and {plural(values, 'file')} of golden values")
    click.echo(f"next: regress calibrate {case}")
