"""Report of one or two runs as one HTML page that needs no other file and no network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from regress.report.html import Card, Chart, Line, Page, Panel, Table, script_json
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
    told = [summary(run).partition(", ") for run in runs]
    return Page(
        " and ".join(run.name for run in runs),
        "".join(told[0]) if len(runs) == 1 else "",
        cards=[
            Card(run.name, steps, f"{rest} · {run.folder}" if rest else str(run.folder))
            for run, (steps, _, rest) in zip(runs, told, strict=True)
        ],
        panels=[*_panels(runs)],
        program=("plot.js", "run.js"),
        data=script_json({"runs": trees, "charts": charts_of(runs)}),
    ).html()


def _panels(runs: Sequence[RunData]) -> Iterator[Panel]:
    names = [run.name if len(runs) > 1 else "" for run in runs]
    hint = "First and last value, and the best one where one end is better."
    rows = [(title, each[0].metric, *(figure.words() for figure in each)) for title, each in figures(runs)]
    columns = ("figure", "metric", *(run.name for run in runs))
    yield Panel("Figures", "figures", hint, tables=[Table(columns, rows)])
    charts = [Chart(f"chart-{n}", one["title"], one["hint"]) for n, one in enumerate(charts_of(runs))]
    yield Panel("", "charts", charts=[*charts, Chart("any", "Any metric", wide=True)])
    columns = ("segment", "from", "step", "update", "first row", "last row", "rows")
    tables = [Table(columns, [*_segments(run)], name) for name, run in zip(names, runs, strict=True)]
    hint = "Processes of a run; dotted lines in the charts are resumes. Steps that a resume made again are shown once."
    yield Panel("Segments", "segments", hint, tables=tables)
    samples = [_samples(run, name) for name, run in zip(names, runs, strict=True) if run.samples]
    if samples:
        yield Panel("Evaluated samples", "samples", tables=samples)
    notes = [Line(f"{run.name}: {note}") for run in runs for note in run.notes]
    if notes:
        yield Panel("Notes", lines=notes)


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


def _samples(run: RunData, name: str) -> Table:
    """Return the last evaluated samples."""
    shown = run.samples[-SAMPLES_SHOWN:][::-1]
    columns, more = columns_of(shown), len(run.samples) - len(shown)
    rows = [
        ["" if sample.get(column) is None else str(sample[column]) for column in columns] for sample in shown
    ]
    hint = "The last ones come first" + (f"; {more} earlier ones are in the JSON report." if more else ".")
    return Table(columns, rows, name, hint)
