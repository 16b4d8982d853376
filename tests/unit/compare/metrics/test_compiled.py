"""Compiled measures are those of numpy: what is counted and every maximum to the last bit, sums almost."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regress.compare.metrics import striped_measures
from regress.compare.metrics.chunked_measures import measure_chunks
from regress.compare.metrics.compiled_measures import measure_compiled
from regress.compare.metrics.error_measures import Measures
from regress.compare.metrics.measure_kernels import NEAR, TILE
from regress.compare.metrics.striped_measures import measure
from regress.dump.numpy_arrays import DTYPES, Array, is_float

FLOATS = [name for name, dtype in DTYPES.items() if is_float(dtype)]
SIZES = (1, 31, 33, TILE - 1, TILE, 2 * TILE + 5)
SUMS = ("error_l2", "golden_l2", "error_sum", "product")


@pytest.mark.one_in(4)
@pytest.mark.parametrize("bitwise", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_numba_numpy_finds_the_same(
    monkeypatch: pytest.MonkeyPatch, dtype: str, bitwise: bool
) -> None:
    golden = np.random.default_rng(0).standard_normal(striped_measures.LARGE).astype(DTYPES[dtype])
    actual = noisy(np.random.default_rng(1), golden, "noise")
    compiled = measure(actual, golden, 1e-3, bitwise=bitwise)
    monkeypatch.setattr(striped_measures, "_compiles", lambda: False)
    monkeypatch.setitem(sys.modules, "regress.compare.metrics.compiled_measures", None)
    plain = measure(actual, golden, 1e-3, bitwise=bitwise)
    assert (plain.over, plain.worst, plain.max_error) == (compiled.over, compiled.worst, compiled.max_error)
    assert plain.over


def noisy(rng: np.random.Generator, golden: Array, kind: str) -> Array:
    """Return golden values with an engine's possible noise."""
    with np.errstate(all="ignore"):
        wide = golden.astype(np.float64)
        match kind:
            case "equal":
                return golden.copy()
            case "noise":
                return (wide * (1 + 1e-3 * rng.standard_normal(golden.shape))).astype(golden.dtype)
            case "spread":  # errors of all sizes
                factor = np.exp2(-rng.integers(0, 60, golden.shape))
                return (wide + factor * rng.standard_normal(golden.shape)).astype(golden.dtype)
            case "sparse":
                mask = rng.random(golden.shape) < 0.01
                return np.where(mask, (wide + 1).astype(golden.dtype), golden)
            case _:
                return bits(rng, golden.dtype, golden.size)


def bits(rng: np.random.Generator, dtype: np.dtype, size: int) -> Array:
    """Any values at all: NaN, infinities, subnormal numbers, zeros of both signs."""
    return rng.integers(0, 256, size * dtype.itemsize, np.uint8).view(dtype)


def require_same(found: Measures, expected: Measures, actual: Array, golden: Array) -> None:
    with np.errstate(all="ignore"):
        T, R = (np.where(np.isfinite(a), a, 0).astype(np.float64) for a in (actual, golden))
        size = float(np.abs(T - R).sum()), float(np.abs(T * R).sum() + (R * R).sum())
    for spec in fields(Measures):
        ours, theirs = getattr(found, spec.name), getattr(expected, spec.name)
        if spec.name in SUMS:
            slack = {"error_sum": size[0], "product": size[1]}.get(spec.name, abs(theirs))
            assert np.array_equal(ours, theirs, equal_nan=True) or abs(ours - theirs) <= 1e-12 * slack, (
                spec.name
            )
        elif spec.name == "worst_row" and theirs is not None:
            assert (ours.error_l2, ours.golden_l2) == pytest.approx((theirs.error_l2, theirs.golden_l2))
        elif spec.name == "max_relative":
            assert ours == pytest.approx(theirs, rel=2e-15), spec.name
        else:
            assert ours == theirs, spec.name


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", FLOATS)
@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from(SIZES),
    kind=st.sampled_from(["equal", "noise", "spread", "sparse", "any"]),
    golden=st.sampled_from(["normal", "zeros", "any"]),
    special=st.integers(0, 3),
    bitwise=st.booleans(),
    rows=st.sampled_from([None, 1, 3]),
)
def test_the_same_as_numpy(
    dtype: str, seed: int, size: int, kind: str, golden: str, special: int, bitwise: bool, rows: int | None
) -> None:
    rng = np.random.default_rng(seed)
    size *= rows or 1
    R = {
        "normal": lambda: rng.standard_normal(size).astype(DTYPES[dtype]),
        "zeros": lambda: np.where(rng.random(size) < 0.5, 0, rng.standard_normal(size)).astype(DTYPES[dtype]),
        "any": lambda: bits(rng, DTYPES[dtype], size),
    }[golden]()
    T = noisy(rng, R, kind)
    for side in (T, R):
        side[rng.integers(0, size, special)] = np.nan
    bound = float(rng.choice([0.0, 1e-4, 1.0]))
    row = None if rows is None else size // rows
    found = measure_compiled(T, R, bound, bitwise, row)
    require_same(found, measure_chunks(T, R, bound, bitwise, row), T, R)


def test_errors_far_below_the_largest_are_counted_by_octave() -> None:
    golden = np.zeros(3 * NEAR, np.float32)
    actual = np.exp2(-np.arange(3 * NEAR)).astype(np.float32)
    found = measure_compiled(actual, golden, 1.0, False, None)
    assert found.octaves == {1 - k: 1 for k in range(3 * NEAR)}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("unit", [1e200, 1e-200, 1e300])
def test_squares_beyond_float64_are_those_of_numpy(unit: float) -> None:
    golden = np.full(5000, unit)
    found = measure_compiled(golden * 2, golden, 0.0, False, None)
    assert found.golden_l2 == pytest.approx(unit * math.sqrt(5000))
    assert found.error_l2 == pytest.approx(unit * math.sqrt(5000))


@pytest.mark.parametrize("offset", [0, 1])
def test_arrays_that_are_read_only_or_lie_askew(offset: int) -> None:
    data = bytes(offset) + np.arange(100, dtype=np.float32).tobytes()
    golden = np.frombuffer(data, np.uint8)[offset:].view(np.float32)
    actual = golden.copy()
    actual[7] += 1
    assert measure_compiled(actual, golden, 0.0, False, None).worst == 7


@pytest.mark.parametrize("row", [None, 7])
def test_stripes_and_threads_do_not_show(monkeypatch: pytest.MonkeyPatch, row: int | None) -> None:
    rng = np.random.default_rng(0)
    golden = rng.standard_normal(7 * 3000).astype(np.float32)
    actual = noisy(rng, golden, "spread")
    whole = measure(actual, golden, 0.1, row=row)
    monkeypatch.setattr(striped_measures, "LARGE", 1)
    monkeypatch.setattr(striped_measures, "STRIPE", 4096)
    one = measure(actual, golden, 0.1, row=row)
    assert measure(actual, golden, 0.1, row=row, threads=2) == one
    require_same(one, whole, actual, golden)


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("stripe", [10, 50, 700])
def test_parts_that_do_not_lie_in_one_piece(
    monkeypatch: pytest.MonkeyPatch, order: tuple[int, ...], stripe: int
) -> None:
    rng = np.random.default_rng(0)
    golden = rng.standard_normal((11, 9, 8)).transpose(order)
    actual = noisy(rng, golden, "noise")
    expected = measure(actual.copy(), golden.copy(), 1e-3, row=golden.shape[-1])
    monkeypatch.setattr(striped_measures, "STRIPE", stripe)
    found = measure(actual, golden, 1e-3, row=golden.shape[-1], threads=2)
    require_same(found, expected, actual, golden)


def test_small_comparisons_load_no_compiler() -> None:
    code = (
        "import sys, numpy as np\n"
        "import regress.compare.update_judge, regress.plugin\n"
        "from regress.compare.metrics.striped_measures import LARGE, measure\n"
        "measure(np.ones(1000, np.float32), np.zeros(1000, np.float32))\n"
        "measure(np.ones(LARGE, np.int8), np.zeros(LARGE, np.int8))\n"
        "assert not {'numba', 'torch'} & set(sys.modules)\n"
        "measure(np.ones(LARGE, np.float32), np.zeros(LARGE, np.float32))\n"
        "assert 'numba' in sys.modules and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
