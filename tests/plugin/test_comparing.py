"""Verdicts of a comparison: each kind of difference has its own, and the first line of a failure names it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from regress.compare.verdicts.verdict import Status, Verdict
from regress.golden.value_tree import Tree
from regress.plugin.golden_comparison import compare, tolerance_of
from regress.report.verdict_text import headline

GOLDEN = {
    "loss": 0.5,
    "ids": np.array([3, 4]),
    "layers": [np.float32([1, 2, 4]), np.float32([8])],
    "note": "a",
}
FRAME = pd.DataFrame({"a": [1, 2], "b": [0.5, np.nan]})


def judged(actual: Any, golden: Any, rtol: float = 0.0, atol: float = 0.0) -> list[Verdict]:
    return compare(Tree.of(actual), Tree.of(golden), tolerance_of(rtol, atol, "measured"), "x")


def failed(actual: Any, golden: Any, rtol: float = 0.0, atol: float = 0.0) -> list[str]:
    return [headline(verdict) for verdict in judged(actual, golden, rtol, atol) if not verdict.ok]


def changed(**changes: Any) -> dict[str, Any]:
    return {**GOLDEN, **changes}


def without(*names: str) -> dict[str, Any]:
    return {key: value for key, value in GOLDEN.items() if key not in names}


@pytest.mark.parametrize(
    ("actual", "lines"),
    [
        (changed(loss=0.75), ["drift: x value['loss']: golden 0.5, actual 0.75, 1 of 1 elements"]),
        (changed(loss=np.float32(0.5)), ["dtype: x value['loss']: golden float64, actual float32"]),
        (changed(loss=1), ["dtype: x value['loss']: golden float64, actual int64"]),
        (changed(loss=[0.5]), ["dtype: x value['loss']: golden a tensor, actual a list"]),
        (changed(loss=None), ["dtype: x value['loss']: golden a tensor, actual None"]),
        (changed(loss=float("nan")), [
            "nonfinite: x value['loss']: golden finite, actual NaN (1 of 1 elements do not match)"
        ]),
        (changed(ids=np.array([3, 5])), [
            "drift: x value['ids']: element [1]: golden 4, actual 5, 1 of 2 elements"
        ]),
        (changed(ids=np.array([3, 4], np.int32)), ["dtype: x value['ids']: golden int64, actual int32"]),
        (changed(ids=np.array([[3, 4]])), ["shape: x value['ids']: golden [2], actual [1, 2]"]),
        (changed(layers=[np.float32([1, 2, 4])]), [
            "missing: x value['layers'][1]: the golden has a tensor here, and the value nothing"
        ]),
        (changed(layers={}), ["dtype: x value['layers']: golden a list, actual a dict"]),
        (changed(note="b"), ["drift: x value['note']: golden the text 'a', actual the text 'b'"]),
        (changed(more={"deep": [1]}), ["extra: x value['more']: the value has a dict here, and the golden nothing"]),
        (without("layers"), ["missing: x value['layers']: the golden has a list here, and the value nothing"]),
        (
            changed(loss=0.75, layers=[np.float32([1, 2, 5]), np.float32([9, 9])], note="b"),
            [
                "shape: x value['layers'][1]: golden [1], actual [2]",
                "drift: x value['layers'][0]: element [2]: golden 4, actual 5, 1 of 3 elements",
                "drift: x value['loss']: golden 0.5, actual 0.75, 1 of 1 elements",
                "drift: x value['note']: golden the text 'a', actual the text 'b'",
            ],
        ),
    ],
)  # fmt: skip
def test_first_lines(actual: dict[str, Any], lines: list[str]) -> None:
    assert failed(GOLDEN, GOLDEN) == []
    assert failed(actual, GOLDEN) == lines


@pytest.mark.parametrize(
    ("actual", "lines"),
    [
        (FRAME.assign(a=[1, 3]), ["drift: x value['a']: element [1]: golden 2, actual 3, 1 of 2 elements"]),
        (FRAME.assign(a=[1.0, 2.0]), ["dtype: x value['a']: golden int64, actual float64"]),
        (FRAME.assign(b=["0.5", None]), ["dtype: x value['b']: golden a tensor, actual a column of dtype str"]),
        (FRAME.drop(columns="b"), [
            "missing: x value.columns[0][1]: the golden has the text 'b' here, and the value nothing",
            "missing: x value['b']: the golden has a tensor here, and the value nothing",
        ]),
        (FRAME.fillna(0.0), [
            "nonfinite: x value['b']: golden NaN, actual finite (1 of 2 elements do not match), at element [1]"
        ]),
    ],
)  # fmt: skip
def test_first_lines_of_tables(actual: pd.DataFrame, lines: list[str]) -> None:
    assert failed(FRAME, FRAME) == []
    assert failed(actual, FRAME) == lines


def test_the_tolerance_is_relative_to_the_largest_element_of_a_tensor() -> None:
    golden = [np.float64([1, 1000]), np.float64([1, 2])]
    assert failed([np.float64([1.9, 1000]), np.float64([1, 2])], golden, rtol=1e-3) == []
    assert failed([np.float64([1, 1000]), np.float64([1.9, 2])], golden, rtol=1e-3) == [
        "drift: x value[1]: element [0]: golden 1, actual 1.9, 450 x tolerance"
    ]
    assert failed([np.float64([1, 1000]), np.float64([1.9, 2])], golden, atol=0.9) == []


def test_a_tolerance_is_for_floats_only() -> None:
    assert failed([5, True, "a"], [4, True, "a"], rtol=10.0, atol=10.0) == [
        "drift: x value[0]: golden 4, actual 5, 1 of 1 elements"
    ]
    assert failed([4, False, "b"], [4, True, "a"], atol=10.0) == [
        "drift: x value[1]: golden 1, actual 0, 1 of 1 elements",
        "drift: x value[2]: golden the text 'a', actual the text 'b'",
    ]


def test_nan_and_infinity_must_match_by_position_and_sign() -> None:
    nan, inf = float("nan"), float("inf")
    assert failed(np.array([nan, inf, 1]), np.array([nan, inf, 1]), rtol=1.0) == []
    for other in ([inf, nan, 1], [nan, -inf, 1], [nan, 1, 1], [nan, inf, nan]):
        (line,) = failed(np.array(other), np.array([nan, inf, 1]), rtol=1.0)
        assert line.startswith("nonfinite: x value: golden ")


def test_the_smallest_step_of_any_dtype_counts_without_a_tolerance() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        golden = torch.ones(3, dtype=dtype)
        actual = (
            torch.nextafter(golden, torch.full_like(golden, 2)) if dtype != torch.float16 else golden + 0.001
        )
        (verdict,) = judged(actual, golden)
        assert (verdict.status, verdict.over) == (Status.DRIFT, 3)
        assert verdict.worst is not None
        assert verdict.worst.ulp == 1


@settings(deadline=None)
@given(st.data())
def test_any_single_change_of_a_nested_value_is_found_where_it_is(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    golden = {"a": [np.linspace(1, 2, size) for size in sizes], "b": {"c": 1.0}}
    which = data.draw(st.integers(0, len(sizes) - 1))
    index = data.draw(st.integers(0, sizes[which] - 1))
    step = data.draw(st.floats(-3, 3))
    assume(abs(step) > 1e-3)
    actual = {"a": [array.copy() for array in golden["a"]], "b": {"c": 1.0}}
    actual["a"][which][index] += step
    bad = [verdict for verdict in judged(actual, golden, rtol=1e-4) if not verdict.ok]
    assert [(v.status, v.name, v.over) for v in bad] == [(Status.DRIFT, f"value['a'][{which}]", 1)]
    assert bad[0].worst is not None
    assert bad[0].worst.index == (index,)


def test_every_leaf_is_counted() -> None:
    assert sum(verdict.count for verdict in judged(GOLDEN, GOLDEN)) == 1 + 2 + 3 + 1 + 1
