"""Report of one or two runs as one HTML page that needs no other file and no network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from regress.report.html import rendered, script_json
from regress.report.run_data import RunData, columns_of
from regress.report.run_figures import charts_of, figures, run_json
from regress.report.run_text import moment, summary

SAMPLES_SHOWN = 200
"""Samples of a run in the page; the JSON report has all."""


def run_html(runs: Sequence[RunData]) -> str:
    """Return the page of one run, or of two side by side."""
    trees = [run_json(run) for run in runs]
    for tree in trees:
        del tree["samples"]  # they are in the page itself
    charts = charts_of(runs)
    return rendered(
        "run.html.j2",
        ("run.js",),
        script_json({"runs": trees, "charts": charts}),
        title=" and ".join(run.name for run in runs),
        runs=runs,
        summaries=[(run.name, str(run.folder), summary(run)) for run in runs],
        charts=charts,
        figures=[
            (title, each[0].metric, [figure.words() for figure in each]) for title, each in figures(runs)
        ],
        segments=[[*_segments(run)] for run in runs],
        samples=[_table(run) for run in runs],
        notes=[(run.name, note) for run in runs for note in run.notes],
    )


def _segments(run: RunData) -> Iterator[tuple[str, ...]]:
    for segment in run.segments:
        yield (
            str(segment.number),
            "start" if segment.resumed_from is None else segment.resumed_from,
            str(segment.step),
            "" if segment.update is None else str(segment.update),
            "" if segment.started is None else moment(segment.started),
            "" if segment.ended is None else moment(segment.ended),
            str(segment.rows),
        )


def _table(run: RunData) -> dict[str, Any]:
    """Return the last evaluated samples: columns, rows of texts, and how many more there are."""
    shown = run.samples[-SAMPLES_SHOWN:][::-1]
    columns = columns_of(shown)
    rows = [["" if sample.get(name) is None else str(sample[name]) for name in columns] for sample in shown]
    return {"columns": columns, "rows": rows, "more": len(run.samples) - len(shown)}
