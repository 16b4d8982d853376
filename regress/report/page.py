"""Report as one HTML page that needs no other file and no network."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from regress.report.headroom import COLUMNS, WORDS
from regress.report.html import rendered
from regress.report.model import Report
from regress.report.numbers import multiple, short
from regress.report.page_data import page_data
from regress.report.text import headline

SCRIPTS = ("records.js", "table.js", "details.js", "charts.js", "tokens.js", "main.js")
"""Parts of the page's program, in the order of their dependencies."""

LISTED = 50
"""Number of failures listed above the table of all records."""


def to_html(report: Report) -> str:
    """Return the page, with its data and its programs in one text."""
    return rendered(
        "report.html.j2",
        SCRIPTS,
        page_data(report),
        report=report,
        state={"✓": "ok", "✗": "bad", "!": "unknown"}[report.sign],
        cards=[*_cards(report)],
        failures=[(call.anchor, headline(call.verdict, call.where)) for call in report.failed[:LISTED]],
        findings=[*_findings(report)],
        columns=COLUMNS,
        words=WORDS,
        headroom=[row.cells() for row in report.closest],
    )


def _cards(report: Report) -> Iterator[tuple[str, str, str]]:
    """Yield the figures of the overview: label, value, remark."""
    yield "checks", f"{len(report.calls):,}", f"{report.tensors:,} tensors" if report.tensors else ""
    wheres = {call.where for call in report.failed}
    yield "failed", f"{len(report.failed):,}", f"in {len(wheres)} of {len(_wheres(report))}"
    yield "not judged", f"{len(report.errors):,}", ""
    gravest = max(report.failed, key=lambda call: call.verdict.multiple, default=None)
    if gravest is not None:
        yield "farthest", multiple(gravest.verdict.multiple), f"{gravest.verdict.quantity} of {gravest.where}"
        return
    near = min(report.closest, key=lambda row: row.headroom, default=None)
    if near is not None and near.call is not None:
        room = near.room if near.multiple else "equal"
        yield "least headroom", room, f"{near.quantity}, {short(near.multiple)} of its tolerance"


def _wheres(report: Report) -> set[str]:
    return {call.where for call in report.calls}


def _findings(report: Report) -> Iterator[dict[str, Any]]:
    """Yield the findings on each failing replay: its first divergence and the probable causes."""
    for where in dict.fromkeys([*report.divergences, *report.diagnoses]):
        first = report.divergences.get(where)
        causes = [str(cause) for cause in report.diagnoses.get(where, ())]
        yield {"where": where, "first": "" if first is None else str(first), "causes": causes}
