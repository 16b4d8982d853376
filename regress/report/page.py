"""Report as one HTML page that needs no other file and no network."""

from __future__ import annotations

from collections.abc import Iterator

from regress.report.headroom import COLUMNS, WORDS
from regress.report.html import Card, Chart, Line, Page, Panel, Table, packed_json
from regress.report.model import Report
from regress.report.numbers import multiple, short
from regress.report.page_data import page_data
from regress.report.text import headline

PROGRAM = ("plot.js", "records.js", "table.js", "details.js", "charts.js", "tokens.js", "main.js")

LISTED = 50
"""Number of failures listed above the table of all records."""

_CHARTS = (
    Chart(
        "heat",
        "Rank by microbatch",
        "Rows are ranks, columns microbatches: the largest error of each in multiples of its tolerance, blue within it "
        "and orange beyond. A click filters the records.",
        wide=True,
    ),
    Chart("layers", "By layer", "Largest error of each layer, over all its tensors."),
    Chart("histogram", "Against tolerance", "How many records are how far from their tolerance, which is 1."),
)


def to_html(report: Report) -> str:
    """Return the page, with its data and its programs in one text."""
    return Page(
        report.title,
        report.summary,
        {"✓": "ok", "✗": "bad", "!": "unknown"}[report.sign],
        report.sign,
        [*_cards(report)],
        [*_panels(report)],
        PROGRAM,
        packed_json(page_data(report)),
    ).html()


def _cards(report: Report) -> Iterator[Card]:
    """Yield the figures of the overview."""
    yield Card("checks", f"{len(report.calls):,}", f"{report.tensors:,} tensors" if report.tensors else "")
    wheres, bad = {call.where for call in report.calls}, {call.where for call in report.failed}
    yield Card("failed", f"{len(report.failed):,}", f"in {len(bad)} of {len(wheres)}", bool(bad))
    yield Card("not judged", f"{len(report.errors):,}", bad=bool(report.errors))
    gravest = max(report.failed, key=lambda call: call.verdict.multiple, default=None)
    if gravest is not None:
        found = gravest.verdict
        yield Card("farthest", multiple(found.multiple), f"{found.quantity} of {gravest.where}")
        return
    near = min(report.closest, key=lambda row: row.headroom, default=None)
    if near is not None and near.call is not None:
        room = near.room if near.multiple else "equal"
        yield Card("least headroom", room, f"{near.quantity}, {short(near.multiple)} of its tolerance")


def _panels(report: Report) -> Iterator[Panel]:
    for where in dict.fromkeys([*report.divergences, *report.diagnoses]):
        first = [str(report.divergences[where])] if where in report.divergences else []
        texts = [("First divergence", text) for text in first]
        causes = enumerate(map(str, report.diagnoses.get(where, ())))
        yield Panel(where, texts=[*texts, *(("" if n else "Probable cause", text) for n, text in causes)])
    if report.errors:
        yield Panel("Not judged", "errors", lines=[Line(why, name) for name, why in report.errors.items()])
    if report.failed:
        lines = [
            Line(headline(call.verdict, call.where), anchor=call.anchor) for call in report.failed[:LISTED]
        ]
        more = len(report.failed) - len(lines)
        rest = [Line(f"and {more} more, in the table below")] if more else []
        yield Panel("Failures", "failures", lines=[*lines, *rest])
    yield Panel("Records", "records", controls="records.html.j2")
    yield Panel("", "charts", charts=_CHARTS)
    if report.tokens:
        yield Panel("Tokens", "tokens", controls="tokens.html.j2")
    hint = "How many times larger the largest error of each quantity could have been."
    rows = [row.cells() for row in report.closest]
    yield Panel("Headroom", "headroom", hint, tables=[Table(COLUMNS, rows, words=WORDS)])
    if report.matrix:
        columns = report.matrix.columns
        table = Table(columns, report.matrix.rows, words=columns[:1], marked=" failed")
        yield Panel("Variants", "variants", tables=[table])
    if report.notes or report.environment:
        yield Panel("Notes", lines=[*map(Line, report.notes)], facts=report.environment)
