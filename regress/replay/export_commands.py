"""``regress golden export``: a case as plain files for another trainer."""

from __future__ import annotations

from pathlib import Path

import click

from regress.dump.command_outputs import LocalFolder
from regress.golden.golden_directory import open_store
from regress.golden.golden_options import directory_option
from regress.printable_text import echo


@click.command()
@click.argument("case")
@click.argument("folder", type=LocalFolder(), metavar="DIR")
@directory_option
@click.option(
    "--derived/--no-derived",
    default=True,
    show_default=True,
    help="Write advantages and token weights, too, which follow from the rest.",
)
@click.option("--overwrite", is_flag=True, help="Replace an earlier export.")
def export(case: str, folder: Path, golden_dir: Path | None, derived: bool, overwrite: bool) -> None:
    """Export a case as plain files for a trainer of your own.

    \b
    regress golden export dense exported/dense
    regress golden export dense exported/dense --no-derived --overwrite

    A Hugging Face checkpoint with tokenizer, the reference model, the optimizer state, the rollouts as JSONL,
    objective.json with every number of the loss, and a README.md that explains each file and formula.

    Exit codes: 0 written, 2 the case is damaged or the folder is not free.
    """
    from regress.replay.case_export import export_case

    opened = open_store(golden_dir).case(case)
    written = export_case(opened, folder, derived=derived, overwrite=overwrite)
    echo(f"written: {written}")
    echo(f"read next: {written / 'README.md'}")
