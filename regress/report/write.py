"""A report in files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from regress.dump.files import write_atomically
from regress.report.call import Call
from regress.report.model import Report
from regress.report.page import to_html

JSON_NAME, HTML_NAME = "report.json", "index.html"


def write_report(folder: Path, report: Report) -> list[Path]:
    """Write ``report.json`` and ``index.html`` into a folder, each whole or not at all.

    The bytes depend on what was judged, and not on the order in which workers told it.

    Returns:
        The paths of the files.
    """
    told = replace(report, calls=in_order(report.calls))
    texts = {
        JSON_NAME: json.dumps(told.to_json(), indent=1, allow_nan=False) + "\n",
        HTML_NAME: to_html(told),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_atomically(folder / name, [text.encode()])
    return [folder / name for name in texts]


def in_order(calls: Sequence[Call]) -> list[Call]:
    """By place and name; numbers in them by their value."""
    return sorted(calls, key=lambda call: (call.where, call.precision, _place(call), call.label, call.test))


def _place(call: Call) -> tuple[int, ...]:
    place = call.verdict.place
    return tuple(-1 if v is None else v for v in (place.step, place.update, place.rank, place.micro))
