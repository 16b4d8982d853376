"""Charts and figures of a run: which metrics belong together, and their first, last and best values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from regress.report.numbers import short
from regress.report.run_data import Point, RunData


@dataclass(frozen=True)
class Chart:
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


CHARTS: tuple[Chart, ...] = (
    Chart(
        "Reward",
        "Mean reward of a rollout step, with its least and greatest.",
        ("rollouts/returns_mean", "batch_returns/mean", "rollouts/returns_min", "rollouts/returns_max"),
        "max",
    ),
    Chart(
        "Pass rate",
        "Of held-out prompts: greedy, and of several samples (pass@k) where they were drawn.",
        ("eval_avg_test_pass_rate", "eval_pass_at_*", "eval_pass@*"),
        "max",
    ),
    Chart("Pass rate by level", "Of held-out prompts of each level.", ("eval_level/*/pass_rate",), "max"),
    Chart(
        "Curriculum stage",
        "Stage that problems are drawn from; only an evaluation changes it. A return to the first begins a new round.",
        ("curriculum/current_stage", "curriculum/stage"),
        stepped=True,
    ),
    Chart(
        "Lengths",
        "Tokens of a completion.",
        (
            *("rollouts/completion_length_mean", "rollouts/completion_length_max", "rollouts/length_*"),
            *("eval_completion_length*", "eval_length*"),
        ),
    ),
    Chart(
        "Truncated",
        "Part of the completions that ended at the length limit.",
        ("rollouts/truncated_ratio",),
        "min",
    ),
    Chart(
        "KL",
        "Divergence from the reference, and from the policy before the step's first update.",
        ("training_step/kl", "training_step/approx_kl/*", "rollouts/kl_mean", "training_epoch/kl_mean"),
    ),
    Chart(
        "Clip fraction",
        "Part of the loss tokens whose ratio is clipped.",
        ("training_step/clip_ratio/high", "training_step/clip_ratio/low", "training_step/clip_ratio/*"),
    ),
    Chart(
        "Gradient norm",
        "Norm of the whole gradient before it is clipped.",
        ("training_step/grad_norm", "training_epoch/grad_norm_max"),
    ),
    Chart("Learning rate", "Of each optimizer update.", ("training_step/learning_rate",), stepped=True),
    Chart(
        "Loss", "Of each optimizer update; its value does not tell progress in GRPO.", ("training_step/loss",)
    ),
    Chart("Entropy", "Mean entropy of the policy at loss tokens, in nats.", ("training_step/entropy",)),
)


def lines_of(chart: Chart, runs: Sequence[RunData]) -> list[str]:
    """Return the metrics of a chart that any of the runs has, in the chart's order."""
    names = [*dict.fromkeys(name for run in runs for name in run.series if _has_value(run.series[name]))]
    return [
        *dict.fromkeys(
            name for pattern in chart.metrics for name in sorted(names) if fnmatchcase(name, pattern)
        )
    ]


def _has_value(points: Sequence[Point]) -> bool:
    return any(point.value is not None for point in points)


@dataclass(frozen=True)
class Figure:
    """First, last and best value of one metric of one run; None where it has none."""

    metric: str
    first: Point | None
    last: Point | None
    best: Point | None

    def words(self) -> str:
        """Return ``0.2 -> 0.9 (best 0.95 at step 140)``."""
        if self.first is None or self.last is None:
            return "not logged"
        told = (
            _shown(self.first) if self.first is self.last else f"{_shown(self.first)} -> {_shown(self.last)}"
        )
        return told if self.best is None else f"{told} (best {_shown(self.best)} at step {self.best.step})"


def _shown(point: Point) -> str:
    assert point.value is not None
    return short(point.value)


def figure_of(run: RunData, metric: str, best: str = "") -> Figure:
    """Return the figure of a metric."""
    known = [point for point in run.series.get(metric, ()) if point.value is not None]
    ends = {"max": max, "min": min}
    chosen = ends[best](known, key=lambda point: point.value or 0.0) if known and best else None
    return Figure(metric, known[0] if known else None, known[-1] if known else None, chosen)


def figures(runs: Sequence[RunData]) -> list[tuple[str, list[Figure]]]:
    """Return title and figures (one a run) of the first line of each chart that has data."""
    found = []
    for chart in CHARTS:
        lines = lines_of(chart, runs)
        if lines:
            found.append((chart.title, [figure_of(run, lines[0], chart.best) for run in runs]))
    return found


def charts_of(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Return the charts with data as JSON: title, hint, metrics, form."""
    return [
        {"title": chart.title, "hint": chart.hint, "metrics": lines, "stepped": chart.stepped}
        for chart in CHARTS
        if (lines := lines_of(chart, runs))
    ]


def run_json(run: RunData) -> dict[str, Any]:
    """Return a run as a tree of strict JSON values: series as columns of step, update and value."""
    series: Mapping[str, Any] = {
        name: {
            "x": [round(point.x, 6) for point in points],
            "step": [point.step for point in points],
            "update": [point.update for point in points],
            "value": [point.value for point in points],
        }
        for name, points in run.series.items()
    }
    return {
        "name": run.name,
        "folder": str(run.folder),
        "steps": run.steps,
        "updates": run.updates,
        "segments": [vars(segment) for segment in run.segments],
        "series": series,
        "texts": {name: [[*pair] for pair in told] for name, told in run.texts.items()},
        "samples": [dict(sample) for sample in run.samples],
        "notes": [*run.notes],
    }
