"""Measures of pairs of arrays: the same as the naive computation, for every dtype and across chunks."""

from __future__ import annotations

import math
from dataclasses import fields
from functools import reduce
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from regress.compare.metrics import chunked_measures, striped_measures
from regress.compare.metrics.striped_measures import (
    Measures,
    largest,
    measure,
    nonfinite,
    ratio,
    scaled_residual,
)
from regress.compare.metrics.ulps import ulp_distance, ulps_apart
from regress.dump.numpy_arrays import DTYPES, is_float

FLOATS = [name for name, dtype in DTYPES.items() if is_float(dtype)]
WIDE = ["float16", "bfloat16", "float32", "float64"]
finite = st.floats(-1e6, 1e6, width=32)


@settings(deadline=None)
@given(npst.arrays(np.float64, st.integers(0, 30), elements=finite), st.integers(1, 7), st.data())
def test_measures_do_not_depend_on_the_chunks(golden: np.ndarray, chunk: int, data: st.DataObject) -> None:
    actual = golden + data.draw(npst.arrays(np.float64, golden.shape, elements=finite))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked_measures, "CHUNK", chunk)
        found, top = measure(actual, golden, 10.0), largest(golden)
    error = np.abs(actual - golden)
    assert found.count == error.size
    assert found.over == int((error > 10.0).sum())
    assert found.max_error == error.max(initial=0.0)
    assert top == np.abs(golden).max(initial=0.0)
    assert found.worst == (int(error.argmax()) if error.any() else None)
    assert found.error_l2 == pytest.approx(float(np.linalg.norm(error)), rel=1e-12)
    assert found.golden_l2 == pytest.approx(float(np.linalg.norm(golden)), rel=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int8", "bool"])
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_the_full_set_is_that_of_the_naive_computation(dtype: str, data: st.DataObject) -> None:
    rows, row, chunk = (data.draw(st.integers(1, top)) for top in (4, 4, 9))
    values = st.sampled_from([0.0, 1.0]) if dtype == "bool" else st.integers(-12, 12).map(lambda n: n / 4)
    golden, actual = (
        data.draw(npst.arrays(np.float64, (rows, row), elements=values)).astype(DTYPES[dtype])
        for _ in range(2)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked_measures, "CHUNK", chunk)
        found = measure(actual, golden, 1.0, row=row)
    T, R = actual.astype(np.float64), golden.astype(np.float64)
    error = np.abs(T - R)
    assert found.finite == found.count == T.size
    assert found.mean_error == pytest.approx((T - R).mean(), abs=1e-15)
    assert found.rmse == pytest.approx(math.sqrt((error**2).mean()))
    with np.errstate(all="ignore"):
        assert found.max_relative == np.nanmax(error / np.abs(R), initial=0.0)
    ulps = [ulps_apart(np.asarray(a), np.asarray(g)) for a, g in zip(actual.flat, golden.flat, strict=True)]
    assert found.max_ulp == (max(ulps) if is_float(DTYPES[dtype]) else None)
    alpha = None if not R.any() else float((T * R).sum() / (R * R).sum())
    assert found.alpha == (None if alpha is None else pytest.approx(alpha))
    if alpha is not None:
        left = float(np.linalg.norm(T - alpha * R) / np.linalg.norm(R))
        assert found.residual == pytest.approx(left, abs=1e-6 * found.relative_l2)
        assert scaled_residual([(actual, golden)], alpha) == pytest.approx(left, abs=1e-15)
    for name, bound in found.quantiles.items():
        exact = float(np.quantile(error, striped_measures.QUANTILES[name], method="inverted_cdf"))
        assert (exact <= bound <= 2 * exact) if exact else bound == 0.0
    norms = np.linalg.norm(T - R, axis=1)
    if not norms.any():
        assert found.worst_row is None
    else:
        assert found.worst_row is not None
        assert found.worst_row.error_l2 == pytest.approx(norms.max())
        assert found.worst_row.golden_l2 == pytest.approx(np.linalg.norm(R[found.worst_row.index]))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_parts_in_any_grouping_are_the_whole(sizes: list[int], random: Random) -> None:
    """Merging the measures of parts must not show how they were grouped."""
    special = [0.0, 1.0, 1.5, -2.0, math.inf, -math.inf, math.nan]
    parts = [np.array([[random.choice(special) for _ in range(n)] for _ in range(2)]) for n in sizes]
    found = [measure(*part, 0.25) for part in parts]
    whole = measure(*np.concatenate(parts, axis=1), 0.25)
    left = reduce(Measures.then, found)
    right = reduce(lambda later, earlier: earlier.then(later), reversed(found))
    for name in (spec.name for spec in fields(Measures)):
        expected = getattr(whole, name)
        close = pytest.approx(expected, rel=1e-12) if isinstance(expected, float) else expected
        assert getattr(left, name) == close
        assert getattr(right, name) == close


def test_a_scaled_tensor_is_known_as_one() -> None:
    golden = np.random.default_rng(0).standard_normal(1000)
    found = measure(golden * 3, golden)
    assert found.alpha == pytest.approx(3.0, rel=1e-14)
    assert scaled_residual([(golden * 3, golden)], 3.0) < 1e-15
    assert measure(golden, np.zeros(1000)).alpha is None


def test_a_bias_below_the_noise_shows_in_the_signed_mean() -> None:
    random = np.random.default_rng(0)
    golden, noise = random.standard_normal((2, 10**5))
    found = measure(golden + noise - noise.mean() + 1e-3, golden)
    assert found.mean_error == pytest.approx(1e-3, rel=1e-6)
    assert found.rmse == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_float_is_measured_in_full_precision(dtype: str) -> None:
    golden = np.array([0.0, 1.0, -2.0, 0.5]).astype(DTYPES[dtype])
    actual = np.array([0.0, 1.0, -2.0, 1.0]).astype(DTYPES[dtype])
    found = measure(actual, golden)
    assert (found.max_error, found.worst, found.over) == (0.5, 3, 1)
    assert found.relative_l2 == pytest.approx(0.5 / math.sqrt(5.25))


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name not in FLOATS])
def test_integers_are_compared_exactly(dtype: str) -> None:
    golden = np.array([0, 1, 1], DTYPES[dtype])
    actual = np.array([0, 1, 0], DTYPES[dtype])
    found = measure(actual, golden, bound=5.0)
    assert (found.over, found.worst, found.max_error) == (1, 2, 1.0)


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_neighbours_beyond_the_precision_of_float64_differ(dtype: str) -> None:
    golden = np.array([2**62, 2**62 + 1], dtype)
    actual = np.array([2**62, 2**62 + 2], dtype)
    found = measure(actual, golden)
    assert (found.over, found.worst, found.max_error) == (1, 1, 1.0)
    assert (found.error_l2, found.octaves) == (1.0, {1: 1})


def test_what_is_not_finite_must_match_by_place_kind_and_sign() -> None:
    golden = np.array([np.nan, np.inf, -np.inf, np.nan, 1.0, 2.0])
    assert measure(golden.copy(), golden).mismatched == 0
    assert measure(golden.copy(), golden).finite == 2
    for index, value in [(0, np.inf), (1, -np.inf), (2, np.nan), (3, 1.0), (4, np.nan), (5, np.inf)]:
        actual = golden.copy()
        actual[index] = value
        found = measure(actual, golden)
        assert (found.mismatched, found.first_mismatch) == (1, index)
        assert found.max_error == 0.0
        assert math.isfinite(found.relative_l2)


def test_bytes_tell_what_values_do_not() -> None:
    golden = np.array([0.0, 1.0, np.nan])
    negative = np.array([-0.0, 1.0, np.nan])
    assert measure(negative, golden).over == 0
    found = measure(negative, golden, bitwise=True)
    assert (found.over, found.worst, found.max_error) == (1, 0, 0.0)
    other_nan = golden.copy()
    other_nan.view(np.uint64)[2] += 1
    assert measure(other_nan, golden, bitwise=True).over == 1
    assert measure(other_nan, golden).over == 0


def test_norms_neither_overflow_nor_underflow() -> None:
    for unit in (1e200, 1e-200, 1e300):
        golden = np.array([3.0, 4.0]) * unit
        found = measure(golden * 2, golden)
        assert found.golden_l2 == pytest.approx(5.0 * unit)
        assert found.relative_l2 == pytest.approx(1.0)


def test_the_largest_value_is_finite() -> None:
    assert largest(np.array([np.nan, -3.0, np.inf])) == 3.0
    assert largest(np.array([])) == 0.0
    assert largest(np.array(-2, np.int64)) == 2.0


def test_nonfinite_positions() -> None:
    assert nonfinite(np.array([1.0, np.nan, np.inf], DTYPES["bfloat16"])).tolist() == [False, True, True]
    assert not nonfinite(np.array([1, 2])).any()


@pytest.mark.parametrize("dtype", WIDE)
@given(data=st.data())
@settings(deadline=None, max_examples=30)
def test_ulps_count_representable_values(dtype: str, data: st.DataObject) -> None:
    bits = DTYPES[dtype].itemsize * 8
    top = int(np.array(np.inf, DTYPES[dtype]).view(f"u{bits // 8}"))
    magnitude = data.draw(st.integers(0, top - 2))
    step = data.draw(st.integers(0, min(5, top - 1 - magnitude)))
    a, b = (np.array([m], f"u{bits // 8}").view(DTYPES[dtype]) for m in (magnitude, magnitude + step))
    assert ulp_distance(a, b).tolist() == ulp_distance(b, a).tolist() == [step]
    assert ulp_distance(-a, -b).tolist() == [step]
    assert ulp_distance(-a, b).tolist() == [2 * magnitude + step]


def test_the_widest_ulp_distance_fits() -> None:
    low, high = np.array([-np.inf]), np.array([np.inf])
    assert int(ulp_distance(low, high)[0]) == 2 * int(high.view(np.int64)[0])


def test_ulps_need_one_floating_dtype() -> None:
    with pytest.raises(TypeError, match="not between float32 and float64"):
        ulp_distance(np.ones(1, np.float32), np.ones(1))
    with pytest.raises(TypeError, match="not between int64 and int64"):
        ulp_distance(np.ones(1, np.int64), np.ones(1, np.int64))


@pytest.mark.parametrize("dtype", WIDE)
def test_ulps_to_a_golden_value_of_another_dtype(dtype: str) -> None:
    one = np.ones((), DTYPES[dtype])
    spacing = float(np.nextafter(one, np.asarray(2, DTYPES[dtype]))) - 1.0
    assert ulps_apart(one, np.array(1.0 + 0.25 * spacing, np.float64)) == pytest.approx(
        0.25 if dtype != "float64" else 0.0
    )
    assert ulps_apart(np.asarray(1.0 + spacing, DTYPES[dtype]), np.array(1.0)) == 1.0


def test_ulps_of_what_has_none() -> None:
    assert ulps_apart(np.array(1), np.array(2)) is None
    assert ulps_apart(np.array(np.nan), np.array(1.0)) is None


def test_ratios_at_their_ends() -> None:
    assert ratio(0.0, 0.0) == 0.0
    assert ratio(1.0, 0.0) == math.inf
    assert ratio(1.0, math.inf) == 0.0
    assert ratio(1.0, 2.0) == 0.5


@pytest.mark.parametrize("size", [10, 1 << 21])
@pytest.mark.parametrize("row", [0, 3, 1 << 22])
def test_rows_that_do_not_fit_are_refused(size: int, row: int) -> None:
    """Compiled code checks no bounds."""
    values = np.zeros(size, np.float32)
    with pytest.raises(ValueError, match=f"are not pairs of rows of {row}"):
        measure(values, values, row=row)


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="are not pairs of rows of None"):
        measure(np.zeros(6), np.zeros(5))
