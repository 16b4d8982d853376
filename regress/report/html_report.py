"""Report as one HTML page, with every verdict in columns that are small enough for ten thousand of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from regress.compare.diagnosis.layer_names import merged_layers, multiples_by_layer
from regress.compare.verdicts.affected_elements import Affected
from regress.compare.verdicts.verdict import Verdict
from regress.dump.canonical_json import dumps, float_name, strict
from regress.dump.coordinates import Place
from regress.printable_text import printable
from regress.report.headroom import closest_table, in_order_of_computation, variants_table
from regress.report.html_pages import Card, Chart, Line, Page, Panel, packed_json, script_json
from regress.report.lens_report import LENS, lens_table
from regress.report.number_format import multiple, short
from regress.report.report_model import Report
from regress.report.token_values import TokenTable, TokenValues
from regress.report.verdict_entries import Call
from regress.report.verdict_text import headline

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
    for where, first, causes in report.findings:
        texts = [("First divergence", text) for text in first]
        texts += [("" if number else "Probable cause", text) for number, text in enumerate(causes)]
        yield Panel(where, texts=texts)
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
    for where, lens in report.lenses.items():
        yield Panel(f"Log-probs by layer: {where}", "layers", LENS, tables=[lens_table(lens)])
    hint = "How many times larger the largest error of each quantity could have been."
    yield Panel("Headroom", "headroom", hint, tables=[closest_table(report.closest)])
    if report.variants:
        yield Panel("Variants", "variants", tables=[variants_table(report.variants)])
    if report.notes or report.environment:
        yield Panel("Notes", lines=[*map(Line, report.notes)], facts=report.environment)


_FIGURES = tuple(spec.name for spec in fields(Verdict) if str(spec.type).startswith(("float", "int")))
_TEXTS = ("quantity", "name", "detail", "reason")
_NESTED = tuple(
    spec.name for spec in fields(Verdict) if spec.name not in (*_FIGURES, *_TEXTS, "status", "place")
)
_PLACE = tuple(spec.name for spec in fields(Place))


def page_data(report: Report) -> str:
    """Return JSON that is safe in a script element.

    Texts are a list of the different values and an index for each row; figures have six digits, and those
    that are not finite are the texts that JavaScript's ``Number`` reads; empty columns are left out.
    """
    tree = {
        "count": len(report.calls),
        "columns": _columns(report.calls),
        "quantities": _quantities(report),
        "layers": _layers(report.calls),
        "tokens": [_table(table) for table in report.tokens],
    }
    return script_json(tree)


def _columns(calls: Sequence[Call]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "where": _texts(call.where for call in calls),
        "precision": _texts(call.precision for call in calls),
        "test": _texts(call.test for call in calls),
        "status": _texts(str(call.verdict.status) for call in calls),
        "anchor": _texts(call.anchor for call in calls),
        "place": _texts(str(call.verdict.place) for call in calls),
    }
    found |= {name: _texts(getattr(call.verdict, name) for call in calls) for name in _TEXTS}
    found |= {name: _texts(_nested(call, name) for call in calls) for name in _NESTED}
    found |= {name: [getattr(call.verdict.place, name) for call in calls] for name in _PLACE}
    found |= {name: [figure(getattr(call.verdict, name)) for call in calls] for name in _FIGURES}
    return {name: column for name, column in found.items() if _says(column)}


def _says(column: Any) -> bool:
    return any(column["values"]) if isinstance(column, dict) else any(value is not None for value in column)


def _texts(values: Iterable[str]) -> dict[str, Any]:
    known: dict[str, int] = {}
    codes = [known.setdefault(value, len(known)) for value in values]
    return {"values": [printable(value) for value in known], "codes": codes}


def _nested(call: Call, name: str) -> str:
    value = getattr(call.verdict, name)
    if isinstance(value, Affected):
        return "\n".join(_words(value))
    return dumps(strict(value, name)) if value else ""


def _words(affected: Affected) -> Iterator[str]:
    """Yield what is known of the affected part of a tensor, a line each."""
    total = affected.total
    yield f"{total.hits} of {total.size} {affected.unit}s" + (
        f", in {total.hit_samples} of {total.samples} samples" if total.samples else ""
    )
    if affected.samples:
        yield f"samples {', '.join(affected.samples)}"
    for found, what in ((affected.positions, "positions"), (affected.lengths, "samples of lengths")):
        if found is not None:
            yield f"{what} {found[0]} to {found[1]}; those that hold {found[2]} to {found[3]}"
    for name, count in affected.classes.items():
        if count.hits:
            yield f"{name.replace('_', ' ')}: {count.hits} of {count.size}"
    for dimension, first, stop, size in affected.parts:
        yield f"dimension {dimension}: {first} to {stop - 1} of {size}"
    if affected.offset is not None:
        yield f"{affected.offset:.6g} was added to each"
    if affected.rounded is not None:
        yield f"each has a value that {affected.rounded} can hold"
    for name, numbers in affected.held.items():
        values = ", ".join(f"{key} {value}" for key, value in numbers.items())
        yield f"{name.replace('_', ' ')}: {values}" if values else name.replace("_", " ")


def figure(value: float | None) -> float | str | None:
    """Return a number with six digits, or the text for one that is not finite."""
    if value is None or isinstance(value, int):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else float_name(value)


def _quantities(report: Report) -> list[str]:
    found = {call.verdict.quantity for call in report.calls}
    found |= {values.quantity for table in report.tokens for values in table.values}
    return in_order_of_computation(found)


def _layers(calls: Iterable[Call]) -> list[dict[str, Any]]:
    """Return the largest multiple by layer, for each replay and quantity that has layers."""
    groups: dict[tuple[str, str], list[Mapping[str, float]]] = {}
    for call in calls:
        layers = call.layers or multiples_by_layer([call.verdict])
        if layers:
            groups.setdefault((call.where, call.verdict.quantity), []).append(layers)
    return [
        {"where": where, "quantity": quantity, "layers": _figures(merged_layers(several))}
        for (where, quantity), several in groups.items()
    ]


def _figures(layers: Mapping[str, float]) -> list[tuple[str, float | str | None]]:
    return [(layer, figure(multiple)) for layer, multiple in layers.items()]


def _table(table: TokenTable) -> dict[str, Any]:
    return {
        "where": table.where,
        "place": str(table.place),
        "samples": [*table.samples],
        "lengths": [*table.lengths],
        "ids": [*table.ids],
        "text": _texts(table.text),
        "mask": [int(entry) for entry in table.mask],
        "values": [_values(values) for values in table.values],
        "left_out": table.left_out,
    }


def _values(values: TokenValues) -> dict[str, Any]:
    """Return golden values with enough digits to tell them from the actual ones, and the latter as differences."""
    golden, actual = ([_exact(value) for value in side] for side in (values.golden, values.actual))
    return {
        "quantity": values.quantity,
        "tolerance": figure(values.tolerance),
        "golden": golden,
        "actual": None if golden == actual else actual,
    }


def _exact(value: float | None) -> float | str | None:
    if value is None or math.isfinite(value):
        return value
    return float_name(value)
