"""The report as one HTML page that needs no other file and no network."""

from __future__ import annotations

from regress.report.headroom import COLUMNS, WORDS
from regress.report.model import Report
from regress.report.text import headline


def to_html(report: Report) -> str:
    """The page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("regress.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    lines = [headline(call.verdict, call.where) for call in report.failed]
    template = environment.get_template("report.html.j2")
    return template.render(
        title=report.title,
        columns=COLUMNS,
        words=WORDS,
        rows=[row.cells() for row in report.closest],
        failures=lines,
        errors=report.errors,
        matrix=report.matrix,
    )
