"""A run of the corpus of faults as a table of the terminal, a Markdown page and an HTML page."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from regress.dump.command_outputs import write_outputs
from regress.dump.dump_location import Location
from regress.report.number_format import plural, short
from tests.faults.trials.rows import FaultRow, FaultScore, score, to_json

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Faults and checks</title><style>
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 90rem; padding: 0 1rem }}
table {{ border-collapse: collapse; font-size: 13px }} th, td {{ padding: .15rem .5rem; text-align: left }}
th {{ position: sticky; top: 0; background: Canvas }} tr:nth-child(even) {{ background: #8881 }}
.bad {{ color: #b00; font-weight: 600 }} @media (prefers-color-scheme: dark) {{ .bad {{ color: #f77 }} }}
:root {{ color-scheme: light dark }}
</style></head><body>{body}</body></html>
"""


def table(rows: Sequence[FaultRow]) -> Table:
    """Return a row for each replay: what was found, beside what had to be."""
    found = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title, right in (
        ("fault", False),
        ("x tolerance", True),
        ("first divergence", False),
        ("diagnosis", False),
    ):
        found.add_column(title, justify="right" if right else "left", no_wrap=not right, overflow="fold")
    for row in rows:
        cells = (row.name, size(row), first(row), told(row))
        found.add_row(*(Text(cell) for cell in cells), style="" if row.as_it_should else "bold red")
    return found


def size(row: FaultRow) -> str:
    """Return by how much a fault was caught."""
    if not row.caught:
        return "not caught" if row.wrong else "-"
    return "exact" if math.isinf(row.margin) else short(row.margin)


def first(row: FaultRow) -> str:
    """Return what diverged first, and what had to where that is another."""
    if row.problem:
        return f"refused: {row.problem[:160]}"
    if not row.first:
        return ""
    place = f"{row.first} at {row.place}"
    return place if not row.wrong or (row.stage and row.tensor) else f"{place} (expected {row.expected})"


def told(row: FaultRow) -> str:
    """Return the first diagnosis and its score."""
    return f"{row.rules[0]}: {row.diagnosis}" if row.rules and row.diagnosis else (row.rules or ("",))[0]


def summary(found: FaultScore, checks: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines below a table: caught, located, diagnosed, false alarms, and the checks of common practice."""
    yield f"{plural(len(found.faults), 'fault')}: {found.caught} caught by the margin of their kind"
    for what in ("stage", "tensor"):
        good, of = found.share(what)
        yield f"right {what} in {_share(good, of)} of the replays that caught one"
    for part, name in ((False, "tuning part"), (True, "held-out part")):
        counts = found.diagnoses(held_out=part)
        if sum(counts.values()):
            words = ", ".join(f"{count} {kind}" for kind, count in counts.items())
            yield f"first diagnosis, {name}: {words}"
    yield f"{len(found.alarms)} of {plural(len(found.quiet), 'replay')} flagged that must not be"
    for check, meaning in checks.items():
        good, of = found.noticed(check)
        if of:
            alarms, replays = found.disturbed(check)
            extra = f", false alarms {_share(alarms, replays)}" if replays else ""
            yield f"{meaning}: notices {_share(good, of)}{extra}"
    for name in found.escaped:
        yield f"escaped: {name}"
    for row in found.alarms:
        yield f"must not be flagged: {row.name}: {row.problem or row.first}"


Curve = tuple[str, float, float, float, bool]
"""Fault, mean reward at the end of its trainings, least and greatest of healthy ones, True if it is noticed."""


def markdown(
    rows: Sequence[FaultRow],
    checks: Mapping[str, str],
    categories: Mapping[str, str],
    curves: Sequence[Curve] = (),
) -> str:
    """Return the page of a run: what it adds up to, and a table of faults and checks for each category."""
    found = score(rows)
    parts = [
        "# Kill matrix",
        "Every fault of `python -m tests.faults list`, and what notices it. This page is written by "
        "`python -m tests.faults run --matrix docs/kill-matrix.md`; do not edit it.",
        "`x tolerance` is the largest error of the quantity that fails first, in multiples of its tolerance; `exact` "
        "is a verdict without tolerance: a missing record, another mask, or a replay that was refused. `located` "
        "says whether quantity and tensor are those that were written down before the first run. Checks of common "
        "practice are measured on the same replays: `x` where the check notices the fault.",
        "Rules of the diagnosis, and what each fault accepts, were revised after both parts had been looked at: "
        "neither part tells how often the first diagnosis of a fault that nobody has seen is right.",
        "\n".join(f"- {line[:1].upper()}{line[1:]}" for line in summary(found, checks)),
    ]
    for letter, name in categories.items():
        own = [row for row in rows if row.category == letter and row.wrong]
        if own:
            parts += [f"## {letter}. {name[:1].upper()}{name[1:]}", "\n".join(_lines(own, [*checks]))]
    quiet = [row for row in rows if not row.wrong]
    if quiet:
        names = {(row.fault, row.kind): None for row in quiet}
        lines = ["| change | kind | replays | flagged |", "| --- | --- | --- | --- |"]
        for name, kind in names:
            own = [row for row in quiet if row.fault == name]
            replays = ", ".join(dict.fromkeys(f"{row.case}/{row.variant} {row.precision}" for row in own))
            flagged = sum(not row.as_it_should for row in own)
            lines.append(f"| {_plain(name)} | {kind} | {_plain(replays)} | {flagged or ''} |")
        parts += ["## What must not be flagged", "\n".join(lines)]
    if curves:
        lines = ["| fault | reward at the end | healthy seeds | noticed |", "| --- | --- | --- | --- |"]
        for name, end, low, high, seen in curves:
            lines.append(f"| {_plain(name)} | {end:.3f} | {low:.3f} to {high:.3f} | {'x' if seen else ''} |")
        noticed = sum(curve[-1] for curve in curves)
        told = f"A look at the reward curve notices {noticed} of {plural(len(curves), 'fault')}: "
        told += "those whose trainings end outside of the range of healthy seeds."
        parts += ["## Reward curves", told, "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def _lines(rows: Sequence[FaultRow], checks: Sequence[str]) -> Iterator[str]:
    titles = ["fault", "replay", "x tolerance", "first divergence", "located", "diagnosis", *checks]
    yield f"| {' | '.join(titles)} |"
    yield f"| {' | '.join('---' for _ in titles)} |"
    for row in rows:
        cells = [
            row.fault,
            f"{row.case}/{row.variant} {row.precision}",
            size(row),
            row.first or ("refused" if row.problem else ""),
            "yes" if row.stage and row.tensor else "stage" if row.stage else "no",
            row.diagnosis,
            *("x" if row.common.get(check) else "" if check in row.common else "-" for check in checks),
        ]
        yield f"| {' | '.join(_plain(cell) for cell in cells)} |"


def page(rows: Sequence[FaultRow], checks: Mapping[str, str]) -> str:
    """Return the HTML page of a run."""
    lines = "".join(f"<li>{html.escape(line)}</li>" for line in summary(score(rows), checks))
    titles = ["fault", "kind", "replay", "x tolerance", "first divergence", "expected", "diagnosis", *checks]
    head = "".join(f"<th>{html.escape(title)}</th>" for title in titles)
    return _PAGE.format(
        body=f"<h1>Faults and checks</h1><ul>{lines}</ul><table><thead><tr>{head}</tr></thead><tbody>"
        + "".join(_row(row, [*checks]) for row in rows)
        + "</tbody></table>"
    )


def _row(row: FaultRow, checks: Sequence[str]) -> str:
    cells = [
        row.fault,
        row.kind,
        f"{row.case}/{row.variant} {row.precision}",
        size(row),
        first(row),
        row.expected,
        told(row),
        *("x" if row.common.get(check) else "" for check in checks),
    ]
    style = "" if row.as_it_should else ' class="bad"'
    return f"<tr{style}>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>"


def write(folder: Location, rows: Sequence[FaultRow], checks: Mapping[str, str]) -> list[Location]:
    """Write ``faults.json``, ``faults.html`` and ``faults.txt`` into a folder, and return their paths."""
    lines = [f"{row.name}: {size(row)}; {first(row)}; {told(row)}" for row in rows]
    texts = {
        "faults.json": to_json(rows),
        "faults.html": page(rows, checks),
        "faults.txt": "\n".join([*lines, "", *summary(score(rows), checks)]) + "\n",
    }
    return write_outputs(folder, texts)


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({100 * part / whole:.1f} %)" if whole else "0 of 0"


def _plain(text: str) -> str:
    """Return text that Markdown leaves as it is, within a cell of a table."""
    return (
        text.replace("\\", "\\\\")
        .replace("|", "\\|")
        .replace("_", "\\_")
        .replace("*", "\\*")
        .replace("\n", " ")
    )
