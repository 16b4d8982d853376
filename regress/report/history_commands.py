"""``regress history``: how much of its tolerance each quantity used, run by run."""

from __future__ import annotations

from pathlib import Path

import click

from regress.dump.command_outputs import Output, json_option, write_output
from regress.printable_text import echo


@click.command()
@click.argument(
    "reports",
    nargs=-1,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="[REPORT.json]...",
)
@click.option(
    "--history",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("regress-history.sqlite"),
    show_default=True,
    help="File of the earlier runs, made if it is not there.",
)
@click.option(
    "--last", type=click.IntRange(1), default=40, show_default=True, help="Runs that are looked at."
)
@json_option
def history(reports: tuple[Path, ...], file: Path, last: int, json_file: Output | None) -> None:
    """Keep how much of its tolerance each quantity used, and tell what rose.

    \b
    pytest --regress-report && regress history regress-report/report.json
    regress history                                    what is kept, without a new report

    A report that was added before is not added again. What used more than twice as much as in any earlier run, or
    failed, comes first.
    """
    from regress.report.headroom_history import add_reports, courses, history_json

    added = add_reports(file, reports)
    found = courses(file, last)
    for one in found:
        echo(f"{'rose: ' if one.rose else ''}{one}")
    echo(f"{added} of {len(reports)} reports added: {file}")
    if json_file is not None:
        write_output(json_file, history_json(found))
