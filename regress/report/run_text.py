"""Report of a run as text: its figures, segments, evaluated samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from regress.report.numbers import plural
from regress.report.run_data import RunData, Segment, columns_of
from regress.report.run_figures import figures

SAMPLES_SHOWN = 5
WIDTH = 100
"""Characters of a sample's field that are shown."""


def run_text(runs: Sequence[RunData]) -> str:
    """Return the text, which ends with a newline."""
    return "\n".join(_lines(runs)) + "\n"


def _lines(runs: Sequence[RunData]) -> Iterator[str]:
    for run in runs:
        yield f"{printable(run.name)}: {summary(run)}"
    yield ""
    told = figures(runs)
    wide = max((len(title) for title, _ in told), default=0)
    for title, each in told:
        for run, figure in zip(runs, each, strict=True):
            name = f"{printable(run.name)}: " if len(runs) > 1 else ""
            yield f"{title:<{wide}}  {name}{figure.words()}"
    for run in runs:
        mark = f" of {printable(run.name)}" if len(runs) > 1 else ""
        if len(run.segments) > 1:
            yield ""
            yield f"Segments{mark}:"
            yield from (f"  {segment_words(segment)}" for segment in run.segments)
        if run.samples:
            yield ""
            yield f"Last evaluated samples{mark} ({len(run.samples)} in all):"
            yield from _samples(run)
        for note in run.notes:
            yield f"note: {printable(note)}"


def _samples(run: RunData) -> Iterator[str]:
    for sample in run.samples[-SAMPLES_SHOWN:]:
        fields = (f"{printable(name)}={_cut(sample[name])}" for name in columns_of([sample]))
        yield f"  {', '.join(fields)}"


def summary(run: RunData) -> str:
    """Return how much of a run there is, in words."""
    parts = [plural(run.steps, "step")]
    if run.updates:
        parts.append(plural(run.updates, "optimizer update"))
    if len(run.segments) > 1:
        parts.append(f"{len(run.segments)} segments")
    return ", ".join(parts)


def segment_words(segment: Segment) -> str:
    """Return a segment in words."""
    where = f"step {segment.step}" + ("" if segment.update is None else f", update {segment.update}")
    how = "started" if segment.resumed_from is None else f"resumed from {printable(segment.resumed_from)}"
    when = "" if segment.started is None else f", {moment(segment.started)}"
    return f"{segment.number}: {how} at {where}{when}, {plural(segment.rows, 'row')}"


def moment(seconds: float) -> str:
    """Return a time in UTC; the number itself where it is none."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):
        return str(seconds)


def _cut(value: object) -> str:
    text = printable(value)
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}..."


def printable(value: object) -> str:
    """Return a text of one line without control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(value))
