"""The verdict on one tensor: which fault comes first, on which element, and by how much."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from regress.compare.alignment.aligned_tensor import Aligned, TokenRows, judge_aligned
from regress.compare.alignment.token_overlap import Part
from regress.compare.verdicts.tensor_case import Case, element
from regress.compare.verdicts.tensor_judge import judge_tensor
from regress.compare.verdicts.tolerance import BITWISE, EXACT, Tolerance
from regress.compare.verdicts.verdict import Status, Verdict
from regress.dump.coordinates import Place
from regress.dump.numpy_arrays import DTYPES, Array, is_float
from regress.layout import ShardLayout

LOOSE = Tolerance(0.1, reason="a test")
PLACE = Place(0, rank=0)


def judge(
    actual: Any, expected: Any, tolerance: Tolerance = LOOSE, mask: Array | None = None, **given: Any
) -> Verdict:
    if mask is not None:
        return judge_masked(
            actual, expected, mask, Case("gradient", "w", PLACE, tolerance, None, ()), **given
        )
    return judge_tensor(actual, expected, tolerance, quantity="gradient", name="w", place=PLACE, **given)


def judge_masked(actual: Array, expected: Array, mask: Array, case: Case, **given: Any) -> Verdict:
    inner = ShardLayout.whole(expected.shape[mask.ndim :])
    parts = [
        Part(values.reshape(mask.size, *inner.shape), np.arange(mask.size), inner, values.shape)
        for values in (actual, expected)
    ]
    rows = TokenRows(parts[0], [parts[1]], np.flatnonzero(mask))
    words = partial(element, shape=expected.shape, name=case.name)
    found = Aligned.of_tokens(rows, words)
    return judge_aligned(replace(case, words=words, shape=expected.shape), found, **given)


def test_a_passing_verdict_tells_its_headroom() -> None:
    verdict = judge(np.array([1.0, 4.2]), np.array([1.0, 4.0]))
    assert verdict.ok
    assert verdict.tolerance == pytest.approx(0.4)
    assert verdict.multiple == pytest.approx(0.5)
    assert verdict.relative == pytest.approx(0.05)
    assert verdict.reason == "a test"
    assert verdict.worst is not None
    assert verdict.worst.where == "element [1] of w"


def test_one_element_drifts() -> None:
    golden = np.ones((3, 4), np.float32)
    actual = golden.copy()
    actual[1, 2] = 1.5
    verdict = judge(actual, golden)
    assert (verdict.status, verdict.over, verdict.count) == (Status.DRIFT, 1, 12)
    assert verdict.multiple == pytest.approx(5.0)
    assert verdict.max_error == 0.5
    assert verdict.worst is not None
    assert (verdict.worst.index, verdict.worst.golden, verdict.worst.actual) == ((1, 2), 1.0, 1.5)
    assert verdict.worst.ulp == 2**22


@pytest.mark.parametrize(
    ("actual", "expected", "given", "status", "detail"),
    [
        (None, np.ones(2), {}, Status.MISSING, "golden float64 [2], and nothing of this name was recorded"),
        (np.ones(2), None, {}, Status.EXTRA, "actual float64 [2], and no golden of this name"),
        (
            np.ones(3),
            np.ones(2, np.float32),
            {"dtype": "float32"},
            Status.DTYPE,
            "golden float32, actual float64",
        ),
        (np.ones(2), np.ones(2, np.int64), {}, Status.DTYPE, "golden int64, actual float64"),
        (np.ones(2, np.int64), np.ones(2), {}, Status.DTYPE, "golden float64, actual int64"),
        (np.full(3, np.nan), np.ones(2), {}, Status.SHAPE, "golden [2], actual [3]"),
        (np.ones((2, 1)), np.ones(2), {}, Status.SHAPE, "golden [2], actual [2, 1]"),
        (np.ones(()), np.ones(1), {}, Status.SHAPE, "golden [1], actual []"),
        (
            np.array([np.nan, 9.0]),
            np.ones(2),
            {},
            Status.NONFINITE,
            "golden finite, actual NaN (1 of 2 elements do not match)",
        ),
        (
            np.array([np.inf, 1.0]),
            np.array([-np.inf, 1.0]),
            {},
            Status.NONFINITE,
            "golden -infinity, actual infinity (1 of 2 elements do not match)",
        ),
    ],
)
def test_graver_faults_come_first(
    actual: Any, expected: Any, given: dict[str, Any], status: Status, detail: str
) -> None:
    verdict = judge(actual, expected, **given)
    assert (verdict.status, verdict.detail) == (status, detail)


def test_bytes_ask_for_the_same_dtype() -> None:
    verdict = judge(np.ones(2), np.ones(2, np.float32), BITWISE)
    assert (verdict.status, verdict.detail) == (Status.DTYPE, "golden float32, actual float64")
    assert judge(np.ones(2, np.float32), np.ones(2)).ok, "a precision tier compares with float64"


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_tensors_of_every_dtype_pass_in_every_tier(dtype: str) -> None:
    array = np.array([[0, 1], [1, 0]]).astype(DTYPES[dtype])
    for tolerance in (LOOSE, EXACT, BITWISE):
        assert judge(array.copy(), array, tolerance, dtype=dtype).ok


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_changed_element_of_every_dtype_fails_in_the_bitwise_tier(dtype: str) -> None:
    array = np.array([[0, 1], [1, 0]]).astype(DTYPES[dtype])
    changed = array.copy()
    changed[1, 1] = True if dtype == "bool" else 1
    verdict = judge(changed, array, BITWISE)
    assert verdict.status is (Status.DRIFT if is_float(DTYPES[dtype]) else Status.MASK)
    assert verdict.worst is not None
    assert verdict.worst.index == (1, 1)
    assert verdict.multiple == math.inf


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_one_ulp_fails_in_the_bitwise_tier(dtype: str) -> None:
    golden = np.linspace(1, 2, 100).astype(DTYPES[dtype])
    actual = golden.copy()
    actual.view(f"u{golden.dtype.itemsize}")[42] += 1
    verdict = judge(actual, golden, BITWISE)
    assert (verdict.status, verdict.over) == (Status.DRIFT, 1)
    assert verdict.detail == "1 of 100 elements differ in their bytes"
    assert verdict.worst is not None
    assert (verdict.worst.index, verdict.worst.ulp) == ((42,), 1.0)


def test_all_zero_tensors_that_are_equal_pass_and_others_do_not() -> None:
    zeros = np.zeros(4)
    assert judge(zeros, zeros, Tolerance(1e-12)).ok
    verdict = judge(np.array([0, 0, 1e-300, 0]), zeros, Tolerance(1e-12))
    assert (verdict.status, verdict.multiple, verdict.relative) == (Status.DRIFT, math.inf, math.inf)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 2)])
def test_empty_tensors_pass_with_nothing_compared(shape: tuple[int, ...]) -> None:
    for tolerance in (LOOSE, EXACT, BITWISE):
        verdict = judge(np.zeros(shape), np.zeros(shape), tolerance)
        assert verdict.ok
        assert verdict.count == 0
    assert judge(np.zeros((0, 1)), np.zeros((0, 2))).status is Status.SHAPE


def test_a_number_is_a_tensor_without_dimensions() -> None:
    verdict = judge(np.array(2.0), np.array(1.0))
    assert verdict.status is Status.DRIFT
    assert verdict.worst is not None
    assert (verdict.worst.index, verdict.worst.where) == ((), "w")


def test_only_what_the_mask_holds_is_compared() -> None:
    golden, mask = np.ones((2, 3, 2)), np.array([[True, True, False], [True, False, False]])
    junk = np.where(mask[..., None], golden, 1e9)
    verdict = judge(junk, golden, mask=mask)
    assert verdict.ok
    assert verdict.count == 6
    junk[1, 0, 1] = 2.0
    verdict = judge(junk, golden, mask=mask)
    assert (verdict.status, verdict.over) == (Status.DRIFT, 1)
    assert verdict.worst is not None
    assert verdict.worst.index == (1, 0, 1)


def test_the_scale_is_that_of_the_masked_golden_values() -> None:
    golden = np.array([1.0, 1e9])
    assert not judge(np.array([1.2, 0.0]), golden, mask=np.array([True, False])).ok
    assert judge(np.array([1.2, 0.0]), golden, mask=np.array([True, False]), scale=3.0).ok


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_in_padding_is_a_fault(value: float) -> None:
    golden, mask = np.zeros((2, 2)), np.array([[True, False], [True, True]])
    actual = golden.copy()
    actual[0, 1] = value
    verdict = judge(actual, golden, mask=mask)
    assert verdict.status is Status.NONFINITE
    assert "where no loss token lies, and nothing of the kind on the golden side" in verdict.detail
    assert verdict.worst is not None
    assert verdict.worst.index == (0, 1)


def test_what_is_not_finite_on_both_sides_must_lie_at_the_same_place() -> None:
    golden = np.array([1.0, np.nan, 2.0, 3.0])
    assert judge(golden.copy(), golden).ok
    moved = np.array([1.0, 2.0, np.nan, 3.0])
    verdict = judge(moved, golden)
    assert (verdict.status, verdict.over) == (Status.NONFINITE, 2)
    assert verdict.detail == "golden NaN, actual finite (2 of 4 elements do not match)"
    assert verdict.worst is not None
    assert verdict.worst.index == (1,)


def test_an_endless_tolerance_measures() -> None:
    for golden in (np.zeros(2), np.ones(2)):
        verdict = judge(golden + 5, golden, Tolerance(math.inf))
        assert verdict.ok
        assert verdict.multiple == 0.0
        assert verdict.max_error == 5.0


def test_an_overflowing_error_is_a_drift() -> None:
    verdict = judge(np.array([1e308]), np.array([-1e308]))
    assert (verdict.status, verdict.max_error) == (Status.DRIFT, math.inf)


def test_words_of_the_caller_name_the_element() -> None:
    verdict = judge(np.array([1.0, 5.0]), np.ones(2), locate=lambda index: f"token {index}")
    assert verdict.worst is not None
    assert verdict.worst.where == "token 1"


def test_a_verdict_survives_its_json() -> None:
    for verdict in (judge(np.array([1.0, 5.0]), np.ones(2)), judge(None, np.ones(2))):
        assert Verdict.from_json(verdict.to_json()) == verdict


def test_a_verdict_tells_scale_and_bias() -> None:
    golden = np.array([[1.0, 2.0], [3.0, 4.0]])
    verdict = judge(golden / 3, golden)
    assert verdict.alpha == pytest.approx(1 / 3)
    assert verdict.residual is not None
    assert verdict.residual < 1e-15  # measured anew: the difference of two sums would say 1e-9
    assert verdict.mean_error == pytest.approx(-5 / 3)
    assert verdict.max_relative == pytest.approx(2 / 3)
    assert verdict.quantiles == {"p50": 2.0, "p90": verdict.max_error} | dict.fromkeys(
        ("p99", "p999"), verdict.max_error
    )
    assert judge(np.ones(3), np.zeros(3)).alpha is None


def test_the_worst_row_is_named_where_there_are_rows() -> None:
    golden = np.arange(12.0).reshape(2, 2, 3)
    actual = golden.copy()
    actual[1, 0] += 1.0  # each element a little
    actual[0, 1, 2] += 1.5  # the worst element, in another row
    verdict = judge(actual, golden, mask=np.array([[False, True], [True, True]]))
    assert verdict.worst is not None
    assert verdict.worst.index == (0, 1, 2)
    assert verdict.worst_row is not None
    assert verdict.worst_row.index == (1, 0)
    assert verdict.worst_row.where == f"element [1, 0, 0] of {verdict.name}"
    assert verdict.worst_row.error_l2 == pytest.approx(3**0.5)
    assert verdict.worst_row.relative_l2 == pytest.approx((3 / (36 + 49 + 64)) ** 0.5)
    assert Verdict.from_json(verdict.to_json()) == verdict
    assert judge(actual, golden, mask=np.ones((2, 2, 3), bool)).worst_row is None
    assert judge(np.arange(3.0), np.ones(3)).worst_row is None
