"""Reports of a calibration: a table, a page that needs no network, and strict JSON."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from regress.report.calibration_report import CalibrationRow, charts_of, notes, table, write

ROW = CalibrationRow(
    *("gradient", "float32", 2e-6, "weights moved by one ulp", 8e-6),
    ill={"model.layers.*.k_proj.bias": 4e-9},
    spread=1.5e-6,
    closest=0.1875,
    variant="eager",
    fault="one gradient halved",
    multiple=5e4,
)
BARE = CalibrationRow("kl", "bfloat16", None, "an eighth of the dtype's spacing", None, ill={"*": 0.25})
SIZES = st.none() | st.floats(0, math.inf, allow_nan=False)
ROWS = st.lists(
    st.builds(
        CalibrationRow,
        st.sampled_from(["gradient", "kl"]),
        st.sampled_from(["float32", "bfloat16"]),
        *(SIZES, st.just("weights moved by one ulp"), SIZES),
        ill=st.dictionaries(st.sampled_from("ab*"), st.floats(0, 1)),
        spread=SIZES,
        closest=SIZES,
        variant=st.none() | st.just("eager"),
        fault=st.none() | st.just("x"),
        multiple=SIZES,
    ),
    min_size=1,
)


def shown(*rows: CalibrationRow) -> list[str]:
    console = Console(width=200, color_system=None)
    with console.capture() as capture:
        console.print(table("dense", rows).rich())
    return capture.get().splitlines()


def test_the_table_tells_what_a_tolerance_is_made_of_and_worth() -> None:
    *_, line = shown(ROW)
    assert re.split(r"\s{2,}", line.strip()) == [
        *("gradient", "float32", "2.0e-06", "weights moved by one ulp", "8.0e-06, 1 apart"),
        *("1.5e-06", "19%", "one gradient halved", "5e+04"),
    ]
    *_, line = shown(BARE)
    assert line.split() == ["kl", "bfloat16", "-", "-", "absolute"], "nothing was proved"


def test_ill_conditioned_tensors_are_named() -> None:
    assert notes([ROW, BARE, replace(ROW, ill={})]) == [
        "ill-conditioned, so bounded absolutely: gradient in float32: model.layers.*.k_proj.bias 4e-09",
        "ill-conditioned, so bounded absolutely: kl in bfloat16: 0.25",
    ]
    many = replace(ROW, ill=dict.fromkeys("abcde", 1.0))
    assert notes([many])[0].endswith("a 1, b 1, c 1 and 2 more")


@settings(max_examples=10, deadline=None)
@given(ROWS)
def test_whatever_was_measured_can_be_shown(rows: list[CalibrationRow]) -> None:
    assert len(shown(*rows)) >= len(rows)
    points = [x for chart in charts_of(rows) for line in chart["lines"] for x, *_ in line["points"]]
    assert all(map(math.isfinite, points)), "a logarithm of nothing"


def test_the_chart_has_each_size_where_it_is() -> None:
    (chart,) = charts_of([ROW])
    found: dict[str, Any] = {line["name"]: line["points"] for line in chart["lines"]}
    assert {name: [10**x for x, *_ in points] for name, points in found.items()} == {
        "healthy spread": [pytest.approx(1.5e-6)],
        "noise floor": [pytest.approx(2e-6)],
        "tolerance": [pytest.approx(8e-6)],
        "smallest known fault": [pytest.approx(0.4)],
    }
    told = found["smallest known fault"][0][2]
    assert told == "gradient: smallest known fault 4.00e-01\none gradient halved, 5e+04 x tolerance"
    (low, high), ticks = chart["x"]["range"], [at for at, _ in chart["x"]["ticks"]]
    assert low < min(ticks) < max(ticks) < high


def test_files_need_nothing_else(tmp_path: Path) -> None:
    paths = write(tmp_path / "new", "dense", [ROW, replace(BARE, multiple=math.inf)])
    tree = json.loads(paths[0].read_text(), parse_constant=lambda text: pytest.fail(text))
    assert [row["multiple"] for row in tree["rows"]] == [5e4, None]
    page = paths[1].read_text()
    assert not re.search(r"<(script|link)[^>]*(src|href)=", page), "from the network"
    assert "one gradient halved" in page
    assert len(page.encode()) < 50_000
