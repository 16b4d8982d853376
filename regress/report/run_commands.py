"""``regress report``: a run's course on one page, or two runs side by side."""

from __future__ import annotations

import json
from pathlib import Path

import click

from regress.choice_option import Choice
from regress.dump.command_outputs import Output, OutputFile, write_output
from regress.printable_text import echo

FORMATS = ("html", "text", "json")
PAGE = "run-report.html"


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("other", type=click.Path(path_type=Path), required=False, metavar="[RUN2]")
@click.option(
    "--format",
    "form",
    type=Choice(FORMATS),
    help="By default that of the ending of --output (.html, .txt, .json), else html.",
)
@click.option(
    "--output",
    type=OutputFile(),
    metavar="FILE|URL|-",
    help=f"Write there; by default a page is written to {PAGE}, text and JSON are printed.",
)
def report(run: Path, other: Path | None, form: str | None, output: Output | None) -> None:
    """Show the course of a run: reward, pass rate, curriculum, lengths, KL, clip fraction, gradient norm, samples.

    RUN is the output_dir of a training run, finished, interrupted or still going on; a second one is shown beside it.
    The page is one file that needs no network. After a resume each step and update is shown once, as the run that
    goes on has it.

    \b
    regress report outputs/reverse_string
    regress report outputs/base outputs/packed --output both.html
    regress report outputs/reverse_string --format text
    """
    from regress.report.run_data import named_runs
    from regress.report.run_report import run_html, run_json, run_text

    runs = named_runs([run] if other is None else [run, other])
    chosen = form or {".txt": "text", ".json": "json"}.get("" if output is None else output.suffix, "html")
    if chosen == "html":
        text, output = run_html(runs), output or Path(PAGE)
    elif chosen == "text":
        text = run_text(runs)
    else:
        tree = {"schema_version": 1, "runs": [run_json(one) for one in runs]}
        text = json.dumps(tree, indent=1, allow_nan=False) + "\n"
    if output is None:
        echo(text, nl=False)
        return
    write_output(output, text)
