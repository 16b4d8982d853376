"""Report of one or two runs: figures and charts, as text, as JSON and as a page."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from regress.report.html_pages import Card, Chart, Line, Page, Panel, script_json
from regress.report.number_format import plural, short
from regress.report.run_data import Point, RunData, Segment, columns_of
from regress.report.text_table import Table


class MetricChart(NamedTuple):
    """A chart: patterns of the metrics that it shows, one line each.

    Attributes:
        best: ``"max"`` or ``"min"`` if one end of the values is the better one.
        stepped: True if a value holds until the next one.
    """

    title: str
    hint: str
    metrics: Sequence[str]
    best: str = ""
    stepped: bool = False


CHARTS: tuple[MetricChart, ...] = (
    MetricChart(
        "Reward",
        "Mean reward of a rollout step, with its least and greatest.",
        ("rollouts/returns_mean", "batch_returns/mean", "rollouts/returns_min", "rollouts/returns_max"),
        "max",
    ),
    MetricChart(
        "Pass rate",
        "Of held-out prompts: greedy, and of several samples (pass@k) where they were drawn.",
        ("eval_avg_test_pass_rate", "eval_pass_at_*", "eval_pass@*"),
        "max",
    ),
    MetricChart(
        "Pass rate by level", "Of held-out prompts of each level.", ("eval_level/*/pass_rate",), "max"
    ),
    MetricChart(
        "Curriculum stage",
        "Stage that problems are drawn from; only an evaluation changes it. A return to the first begins a new round.",
        ("curriculum/current_stage", "curriculum/stage"),
        stepped=True,
    ),
    MetricChart(
        "Lengths",
        "Tokens of a completion.",
        (
            *("rollouts/completion_length_mean", "rollouts/completion_length_max", "rollouts/length_*"),
            *("eval_completion_length*", "eval_length*"),
        ),
    ),
    MetricChart(
        "Truncated",
        "Part of the completions that ended at the length limit.",
        ("rollouts/truncated_ratio",),
        "min",
    ),
    MetricChart(
        "KL",
        "Divergence from the reference, and from the policy before the step's first update.",
        ("training_step/kl", "training_step/approx_kl/*", "rollouts/kl_mean", "training_epoch/kl_mean"),
    ),
    MetricChart(
        "Clip fraction",
        "Part of the loss tokens whose ratio is clipped.",
        ("training_step/clip_ratio/high", "training_step/clip_ratio/low", "training_step/clip_ratio/*"),
    ),
    MetricChart(
        "Gradient norm",
        "Norm of the whole gradient before it is clipped.",
        ("training_step/grad_norm", "training_epoch/grad_norm_max"),
    ),
    MetricChart("Learning rate", "Of each optimizer update.", ("training_step/learning_rate",), stepped=True),
    MetricChart(
        "Loss", "Of each optimizer update; its value does not tell progress in GRPO.", ("training_step/loss",)
    ),
    MetricChart("Entropy", "Mean entropy of the policy at loss tokens, in nats.", ("training_step/entropy",)),
)


def charts_of(runs: Sequence[RunData]) -> list[tuple[MetricChart, list[str]]]:
    """Return the charts with data, and the metrics of each that any of the runs has."""
    names = sorted({name for run in runs for name in run.series if _known(run, name)})
    found = [
        (
            chart,
            [*dict.fromkeys(name for pattern in chart.metrics for name in fnmatch.filter(names, pattern))],
        )
        for chart in CHARTS
    ]
    return [(chart, metrics) for chart, metrics in found if metrics]


def _known(run: RunData, metric: str) -> list[tuple[float, Point]]:
    return [(point.value, point) for point in run.series.get(metric, ()) if point.value is not None]


def figure(run: RunData, metric: str, best: str = "") -> str:
    """Return the first, last and best value of a metric: ``0.2 -> 0.9 (best 0.95 at step 140)``."""
    known = _known(run, metric)
    if not known:
        return "not logged"
    change = " -> ".join(short(value) for value, _ in dict.fromkeys((known[0], known[-1])))
    if not best:
        return change
    value, point = {"max": max, "min": min}[best](known, key=lambda pair: pair[0])
    return f"{change} (best {short(value)} at step {point.step})"


def run_json(run: RunData) -> dict[str, Any]:
    """Return a run as a tree of strict JSON values: series as columns of step, update and value."""
    return {
        "name": run.name,
        "folder": str(run.folder),
        "steps": run.steps,
        "updates": run.updates,
        "segments": [vars(segment) for segment in run.segments],
        "series": {
            name: {
                "x": [round(point.x, 6) for point in points],
                "step": [point.step for point in points],
                "update": [point.update for point in points],
                "value": [point.value for point in points],
            }
            for name, points in run.series.items()
        },
        "texts": {name: [[*pair] for pair in pairs] for name, pairs in run.texts.items()},
        "samples": [dict(sample) for sample in run.samples],
        "notes": [*run.notes],
    }


_SAMPLES = 5
_WIDTH = 100
"""Characters of a sample's field that are shown."""


def run_text(runs: Sequence[RunData]) -> str:
    """Return the text, which ends with a newline."""
    return "\n".join(_lines(runs)) + "\n"


def _lines(runs: Sequence[RunData]) -> Iterator[str]:
    for run in runs:
        yield f"{_one_line(run.name)}: {_summary(run)}"
    yield ""
    charts = charts_of(runs)
    wide = max((len(chart.title) for chart, _ in charts), default=0)
    for chart, metrics in charts:
        for run in runs:
            name = f"{_one_line(run.name)}: " if len(runs) > 1 else ""
            yield f"{chart.title:<{wide}}  {name}{figure(run, metrics[0], chart.best)}"
    for run in runs:
        mark = f" of {_one_line(run.name)}" if len(runs) > 1 else ""
        if len(run.segments) > 1:
            yield ""
            yield f"Segments{mark}:"
            yield from (f"  {_segment(segment)}" for segment in run.segments)
        if run.samples:
            yield ""
            yield f"Last evaluated samples{mark} ({len(run.samples)} in all):"
        for sample in run.samples[-_SAMPLES:]:
            yield "  " + ", ".join(f"{_one_line(name)}={_cut(sample[name])}" for name in columns_of([sample]))
        for note in run.notes:
            yield f"note: {_one_line(note)}"


def _summary(run: RunData) -> str:
    """Return how much of a run there is, in words."""
    parts = [plural(run.steps, "step")]
    if run.updates:
        parts.append(plural(run.updates, "optimizer update"))
    if len(run.segments) > 1:
        parts.append(f"{len(run.segments)} segments")
    return ", ".join(parts)


def _segment(segment: Segment) -> str:
    """Return a segment in words."""
    where = f"step {segment.step}" + ("" if segment.update is None else f", update {segment.update}")
    how = "started" if segment.resumed_from is None else f"resumed from {_one_line(segment.resumed_from)}"
    when = "" if segment.started is None else f", {_moment(segment.started)}"
    return f"{segment.number}: {how} at {where}{when}, {plural(segment.rows, 'row')}"


def _moment(seconds: float) -> str:
    """Return a time in UTC; the number itself where it is none."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):
        return str(seconds)


def _cut(value: object) -> str:
    text = _one_line(value)
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."


def _one_line(value: object) -> str:
    """Return a text of one line without control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(value))


_SHOWN = 200
"""Samples of a run in the page; the JSON report has all."""


def run_html(runs: Sequence[RunData]) -> str:
    """Return the page of one run, or of two side by side."""
    trees = [run_json(run) | {"samples": []} for run in runs]  # they are in the page itself
    charts = [
        {"title": chart.title, "metrics": metrics, "stepped": chart.stepped}
        for chart, metrics in charts_of(runs)
    ]
    summaries = [_summary(run).partition(", ") for run in runs]
    return Page(
        " and ".join(run.name for run in runs),
        "".join(summaries[0]) if len(runs) == 1 else "",
        cards=[
            Card(run.name, steps, f"{rest} · {run.folder}" if rest else str(run.folder))
            for run, (steps, _, rest) in zip(runs, summaries, strict=True)
        ],
        panels=[*_panels(runs)],
        program=("plot.js", "run.js"),
        data=script_json({"runs": trees, "charts": charts}),
    ).html()


def _panels(runs: Sequence[RunData]) -> Iterator[Panel]:
    names = [run.name if len(runs) > 1 else "" for run in runs]
    hint = "First and last value, and the best one where one end is better."
    charts = charts_of(runs)
    rows = [
        (chart.title, metrics[0], *(figure(run, metrics[0], chart.best) for run in runs))
        for chart, metrics in charts
    ]
    columns = ("figure", "metric", *(run.name for run in runs))
    yield Panel("Figures", "figures", hint, tables=[Table(columns, rows)])
    shown = [Chart(f"chart-{n}", chart.title, chart.hint) for n, (chart, _) in enumerate(charts)]
    yield Panel("", "charts", charts=[*shown, Chart("any", "Any metric", wide=True)])
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
            "" if segment.started is None else _moment(segment.started),
            "" if segment.ended is None else _moment(segment.ended),
            str(segment.rows),
        )


def _samples(run: RunData, name: str) -> Table:
    """Return the last evaluated samples."""
    shown = run.samples[-_SHOWN:][::-1]
    columns, more = columns_of(shown), len(run.samples) - len(shown)
    rows = [
        ["" if sample.get(column) is None else str(sample[column]) for column in columns] for sample in shown
    ]
    hint = "The last ones come first" + (f"; {more} earlier ones are in the JSON report." if more else ".")
    return Table(columns, rows, name, hint)
