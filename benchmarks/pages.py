"""The files of a report on 100,000 records: seconds to write them, and to read their data as a page does.

The records are those of fifty replays on eight ranks with several microbatches; one in ten is beyond its tolerance,
with a worst element of its own. ``REGRESS_BENCH_RECORDS=10000`` makes a quick run.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.report import Report as Told
from benchmarks.timing import alternate, timed
from regress.compare.verdicts.verdict import Status, Verdict, Worst, WorstRow
from regress.dump.coordinates import Place
from regress.report.html_report import to_html
from regress.report.report_files import JSON_NAME, write_report
from regress.report.report_model import Report
from regress.report.terminal_report import whole
from regress.report.verdict_entries import Call

RECORDS = int(os.environ.get("REGRESS_BENCH_RECORDS", "100000"))
QUANTITIES = ("log_probs", "token_loss", "gradient", "param", "activations")
REPLAYS, RANKS, MICROS = 50, 8, 4
WRITE = 20.0
"""Seconds that writing may take."""


def made(count: int) -> Report:
    """Return a report on as many records."""
    return Report("regress replay", [*_calls(count)], tensors=count)


def _calls(count: int) -> Iterator[Call]:
    for number in range(count):
        quantity = QUANTITIES[number % len(QUANTITIES)]
        rest = number // len(QUANTITIES)
        replay, rank, micro = rest % REPLAYS, rest // REPLAYS % RANKS, rest // (REPLAYS * RANKS) % MICROS
        layer = rest // (REPLAYS * RANKS * MICROS)
        name = (
            f"model.layers.{layer}.self_attn.q_proj.weight" if quantity in ("gradient", "param") else quantity
        )
        yield Call(
            f"dense/variant{replay}", "float32", _verdict(number, quantity, name, Place(0, None, rank, micro))
        )


def _verdict(number: int, quantity: str, name: str, place: Place) -> Verdict:
    bad = number % 10 == 0
    size = (number % 97 + 1) * 1e-7
    worst = Worst(
        (number % 13, 5),
        f"sample g{number % 31}/{number % 4}, position {number % 200}",
        1.0,
        1 + size,
        size,
        3.0,
    )
    return Verdict(
        Status.DRIFT if bad else Status.OK,
        quantity,
        f"{name}.{number}" if quantity == "activations" else name,
        place,
        worst=worst,
        multiple=5.0 if bad else 0.1 + number % 7 / 10,
        max_error=size,
        relative=size,
        relative_l2=size / 2,
        scale=1.0,
        over=int(bad),
        count=4096,
        tolerance=1e-6,
        basis={"perturbation": 2e-7, "kappa": 4, "dtype": "float32"},
        reason="measured on this case",
        max_relative=math.inf if number % 3 == 0 else size,
        max_ulp=3.0,
        alpha=1.0 + size,
        residual=size,
        quantiles={"p50": size / 9, "p90": size / 4, "p99": size / 2, "p999": size},
        worst_row=WorstRow((number % 13,), worst.where, size, size),
    )


def run() -> Told:
    """Time the files of a report, together and one by one."""
    told = Told("pages", f"files of a report on {RECORDS} records")
    report = made(RECORDS)
    with TemporaryDirectory(prefix="regress-bench-") as folder:
        works = {
            "all files": lambda: write_report(Path(folder), report),
            "page": lambda: to_html(report),
            "text": lambda: whole(report),
            "JSON read": lambda: json.loads((Path(folder) / JSON_NAME).read_text()),
        }
        measured = alternate({name: timed(work) for name, work in works.items()}, 1)
        told.add_times(measured, "all files")
        told.facts["bytes"] = {path.name: path.stat().st_size for path in Path(folder).iterdir()}
    told.goals["seconds to write"] = (measured.wall("all files"), WRITE)
    return told
