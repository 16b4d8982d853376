"""Commands that run the engine on golden cases: ``regress golden record``, ``calibrate`` and ``validate``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from regress.dump.command_outputs import OutputFolder, write_outputs
from regress.dump.dump_location import Location
from regress.golden.commands import golden
from regress.golden.golden_directory import open_store
from regress.golden.golden_files import CASE_FILE, MANIFEST, TRUTH
from regress.golden.golden_options import code_option, directory_option
from regress.printable_text import echo, hint_at
from regress.progress_bar import progress
from regress.replay.export_commands import export
from regress.report.number_format import plural

if TYPE_CHECKING:
    from regress.replay.tolerance_validation import Validation


_WIDTH = 160  # columns of a table where there is no terminal


@click.command()
@click.argument("case")
@directory_option
@code_option
@click.option(
    "--seeds", type=click.IntRange(3), default=5, show_default=True, help="Perturbations of the weights."
)
@click.option(
    "--proof/--no-proof",
    default=True,
    show_default=True,
    help="Replay held-out variants, which must pass, and known faults, which must not.",
)
@click.option(
    "--report",
    type=OutputFolder(),
    metavar="DIR|URL",
    help="Write calibration.html (a plot) and calibration.json there.",
)
@click.option("--dry-run", is_flag=True, help="Measure and show, but write no tolerance.")
@click.option("--accept", is_flag=True, hidden=True)
@click.option(
    "--quantity",
    "only",
    multiple=True,
    metavar="NAME",
    help="Change the tolerances of this quantity alone; may be repeated.",
)
def calibrate(
    case: str,
    golden_dir: Path | None,
    seeds: int,
    proof: bool,
    report: Location | None,
    dry_run: bool,
    accept: bool,
    only: tuple[str, ...],
) -> None:
    """Measure the tolerances of a golden case.

    \b
    regress golden calibrate dense
    git diff golden/dense/manifest.json        the changes, old and new

    The tolerances are written into the manifest, each with its measurements and its reason.

    \b
    For each quantity and precision the noise floor is the largest of
      the response to weights perturbed by one unit in the last place,
      the error of the precision against float64,
      an eighth of the spacing of the dtype;
    the tolerance is a small multiple of it. Tensors that rounding moves by about
    their own size are ill-conditioned; their bounds are absolute.

    \b
    The table shows, beside each tolerance, its margins on this case:
      the widest healthy variant that it was not measured with,
      the smallest known fault that begins in the quantity.
    """
    from regress.replay.case_recording import keep, measure
    from regress.replay.job_spread import workers
    from regress.replay.tolerance_calibration import replays_of
    from regress.replay.tolerance_proof import rows_of, run_count
    from regress.report.calibration_report import notes, table, write

    if accept:
        hint_at("golden calibrate --accept", "regress golden calibrate")
    store, console = open_store(golden_dir, writes=True), Console()
    total = replays_of(store.case(case), seeds) + (run_count(store.case(case)) if proof else 0)
    with progress(f"calibrating {case}", total) as bar:
        found = measure(
            store, case, seeds=seeds, proof=proof, only=only or None, advance=bar.advance, processes=workers()
        )
    rows = rows_of(found.floors, found.proof)
    wide = console if console.is_terminal else Console(width=max(console.width, _WIDTH))
    wide.print(table(case, rows).rich())
    for line in [*notes(rows), *([] if found.proof is None else found.proof.alarms)]:
        echo(line)
    for path in write(report, case, rows) if report is not None else ():
        echo(f"written: {path}")
    if not dry_run:
        changed = keep(found)
        same = "the tolerances are those that are recorded"
        echo(f"written: {found.case.folder / MANIFEST}" if changed else f"{case}: {same}")


@click.command("validate")
@click.argument("case")
@directory_option
@code_option
@click.option(
    "--seeds",
    "--draws",
    "seeds",
    type=click.IntRange(1),
    default=10,
    show_default=True,
    help="Other seeds of the case.",
)
@click.option("--faults/--no-faults", default=True, show_default=True, help="Try faults, too.")
@click.option("--report", type=OutputFolder(), metavar="DIR|URL", help="Write validation-CASE.json there.")
@click.pass_context
def validate(
    ctx: click.Context, case: str, golden_dir: Path | None, seeds: int, faults: bool, report: Location | None
) -> None:
    """Validate the tolerances of a case on other seeds.

    \b
    regress golden validate dense              ten seeds, about a hundred replays each
    regress golden validate dense --seeds 2 --no-faults

    With another seed the case is made by its recipe, recorded and calibrated in a temporary folder. Then every
    held-out healthy variant must pass in every precision, and every fault that changes anything beyond
    rounding must fail in float32. Nothing is written into the golden directory.

    Exit codes: 0 no false alarm and nothing missed, 1 a false alarm or a fault that passed.
    """
    from regress.replay.tolerance_validation import replays_of_seed
    from regress.replay.tolerance_validation import validate as run
    from regress.report.calibration_report import faults_table, headroom_table

    console = Console()
    opened = open_store(golden_dir).case(case)
    with progress(f"validating {case}", seeds * replays_of_seed(opened, faults)) as bar:
        found = run(opened, seeds, faults=faults, advance=bar.advance)
    wide = console if console.is_terminal else Console(width=max(console.width, _WIDTH))
    echo("largest multiple of the tolerance in healthy replays:")
    wide.print(headroom_table(found.healthy).rich())
    if faults:
        echo("faults, in multiples of the tolerance in float32:")
        wide.print(faults_table(found.faulty).rich())
    for line in (*found.alarms, *found.misses):
        echo(line)
    if report is not None:
        echo(f"written: {_written(report, found)}")
    echo(found.summary)
    ctx.exit(int(bool(found.alarms or found.misses)))


def _written(folder: Location, found: Validation) -> Location:
    from regress.replay.tolerance_validation import to_json

    text = json.dumps(to_json(found), indent=1, allow_nan=False) + "\n"
    return write_outputs(folder, {f"validation-{found.case}.json": text})[0]


@click.command()
@click.argument("case")
@directory_option
@code_option
@click.option(
    "--inputs", is_flag=True, help="Make weights, optimizer state and rollouts again, as the recipe says."
)
@click.option(
    "--quantity",
    "quantities",
    multiple=True,
    metavar="NAME",
    help="Add this quantity to what is recorded, and change nothing else; may be repeated.",
)
def record(case: str, golden_dir: Path | None, inputs: bool, quantities: tuple[str, ...]) -> None:
    """Record a case as its case.yaml says.

    \b
    regress golden record mine
    regress golden record mine --quantity token_gradient       beside what is recorded

    Inputs (weights, optimizer state, rollouts) are made by its recipe if it has none; then the float64 values of
    every quantity are computed, twice. A case in which some faults could not show is made with other seeds, and the
    one that shows them all is stored in its case.yaml; where none does, the key to change is named, and nothing on
    disk changes. Measure the tolerances of the case next: regress golden calibrate CASE.
    """
    from regress.replay.case_recipe import has_inputs
    from regress.replay.case_recording import add
    from regress.replay.case_recording import record as run
    from regress.replay.command_replays import variant_table
    from regress.replay.judging_layouts import layouts_of

    if inputs and quantities:
        raise click.UsageError(
            "--inputs makes another case, whose quantities are all recorded; leave out one of both"
        )
    store = open_store(golden_dir, writes=True)
    opened = store.case(case, allow_changed_inputs=True)
    kept = has_inputs(opened) and not inputs
    written = add(store, case, quantities) if quantities else run(store, case, inputs=inputs)
    if kept and opened.recipe:
        echo(f"{case}: inputs are those that were there; --inputs makes them again, as the recipe says")
    if not written:
        echo(f"{case}: nothing changed")
        return
    values = sum(TRUTH in path.relative_to(opened.folder).parts for path in written)
    echo(f"{case}: wrote {opened.folder / MANIFEST} and {plural(values, 'file')} of golden values")
    seed = store.case(case).config.get("seed")
    if seed != opened.config.get("seed"):
        echo(
            f"{case}: took seed {seed}, with which every signal is there, and not {opened.config.get('seed')}; "
            f"stored in {opened.folder / CASE_FILE}"
        )
    options = "".join(f" --quantity {quantity}" for quantity in quantities)
    echo(f"next: regress golden calibrate {case}{options}")
    echo(layouts_of(store.case(case), variant_table()))


for command in (record, export, calibrate, validate):
    golden.add_command(command)
