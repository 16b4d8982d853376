"""The closest call of every quantity and precision, as a table, JSON and a page."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regress.compare.verdicts.verdict import Status, Verdict
from regress.dump.coordinates import Place
from regress.report.headroom import COLUMNS, closest_calls
from regress.report.terminal_report import headroom_table, printed
from regress.report.verdict_entries import Call


def call(
    quantity: str, multiple: float, *, precision: str = "float64", micro: int = 0, status: Status = Status.OK
) -> Call:
    verdict = Verdict(
        status,
        quantity,
        quantity,
        Place(0, None, 0, micro),
        detail="<b>not</b> alike" if status is not Status.OK else "",
        multiple=multiple,
        max_error=multiple * 1e-12,
        tolerance=1e-12,
        count=10,
    )
    return Call("dense/packed", precision, verdict)


CALLS = [
    call("gradient", 0.5),
    call("log_probs", 0.01, micro=1),
    call("log_probs", 0.25, micro=2),
    call("log_probs", 0.1, precision="float32"),
    call("batch_inputs", 0.0),
    call("log_probs", math.inf, status=Status.DRIFT),
]


def test_the_closest_call_of_each_quantity_and_precision() -> None:
    rows = closest_calls(CALLS)
    assert [(row.quantity, row.precision) for row in rows] == [
        ("batch_inputs", "float64"),
        ("log_probs", "float32"),
        ("log_probs", "float64"),
        ("gradient", "float64"),
    ]
    row = rows[2]
    assert (row.multiple, row.headroom) == (0.25, 4.0)
    assert (row.passed, row.failed, row.elements) == (2, 1, 30)
    assert row.call is not None
    assert row.call.verdict.place.micro == 2
    assert rows[0].headroom == math.inf


@settings(deadline=None)
@given(st.permutations(CALLS))
def test_the_rows_do_not_depend_on_who_came_first(calls: list[Call]) -> None:
    assert [row.to_json() for row in closest_calls(calls)] == [row.to_json() for row in closest_calls(CALLS)]


def test_equally_close_calls_are_told_apart_by_name() -> None:
    calls = [call("loss", 0.5, micro=micro) for micro in (2, 0, 1)]
    (row,) = closest_calls(calls)
    assert row.call is not None
    assert row.call.verdict.place.micro == 0


def test_the_table() -> None:
    text = printed(headroom_table(closest_calls(CALLS), 200).rich(), 200, False)
    header, _, *lines = [line for line in text.splitlines() if line.strip()]
    assert all(column in header for column in COLUMNS)
    assert "equal" in lines[0]
    assert lines[2].split()[:4] == ["log_probs", "float64", "0.25", "4"]
    assert "dense/packed/step0/rank0/micro2: log_probs" in lines[2]


@pytest.mark.parametrize("width", [40, 80, 100, 120, 150, 200])
def test_no_figure_is_cut_off_whatever_the_width(width: int) -> None:
    """A terminal of 120 columns showed ten of them, each cut off after a letter."""
    table = headroom_table(closest_calls(CALLS), width)
    assert {"quantity", "x tolerance", "headroom", "failed"} <= {*table.columns}
    assert ("closest call" in table.columns) == (width >= 150)
    if width >= 80:
        assert "…" not in printed(table.rich(), width, False)


def test_a_quantity_that_only_failed_has_no_closest_call() -> None:
    (row,) = closest_calls([call("loss", 3.0, status=Status.DRIFT)])
    assert (row.call, row.passed, row.failed) == (None, 0, 1)
    assert len(row.cells()) == len(COLUMNS)
    assert row.to_json()["closest"] is None
