"""A tensor in blocks is judged as the whole: however it is cut, and wherever its elements lie."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regress.compare.verdicts.tensor_case import Block, Case
from regress.compare.verdicts.tensor_judge import judge_tensor, judge_values
from regress.compare.verdicts.tolerance import BITWISE, Tolerance
from regress.dump.coordinates import Place

BOUNDS = [Tolerance(0.0), Tolerance(1e-3), Tolerance(0.5), BITWISE]
ROWS, WIDTH = 12, 3


@settings(deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sets(st.integers(1, ROWS - 1)),
    st.sampled_from(BOUNDS),
    st.sampled_from(["log_probs", "gradient"]),
    st.booleans(),
)
def test_blocks_are_judged_as_their_tensor(
    seed: int, cuts: set[int], tolerance: Tolerance, quantity: str, damaged: bool
) -> None:
    draw = np.random.default_rng(seed)
    golden = draw.standard_normal((ROWS, WIDTH))
    actual = golden * (1 + draw.choice([0.0, 1e-4, 1e-2], (ROWS, 1)) * draw.standard_normal((ROWS, WIDTH)))
    if damaged:
        actual[draw.integers(ROWS), draw.integers(WIDTH)] = draw.choice([np.nan, np.inf])
    case = Case(quantity, "w", Place(0), tolerance, None, actual.shape)
    edges = [0, *sorted(cuts), ROWS]

    def blocks() -> list[Block]:
        return [
            Block(actual[a:b], golden[a:b], a * WIDTH if a % 2 else np.arange(a, b), WIDTH, WIDTH)
            for a, b in pairwise(edges)
        ]

    found = judge_values(case, blocks, floats=True).to_json()
    whole = judge_tensor(actual, golden, tolerance, quantity=quantity, name="w", place=Place(0)).to_json()
    assert _texts(found) == _texts(whole)
    assert _numbers(found) == pytest.approx(_numbers(whole), rel=1e-9, abs=1e-14, nan_ok=True)


def test_what_scaling_explains_is_measured_over_all_blocks() -> None:
    golden = np.random.default_rng(0).standard_normal(100)
    actual = golden * 3
    case = Case("gradient", "w", Place(0), Tolerance(1e-6), None, actual.shape)
    blocks = [Block(actual[i : i + 10], golden[i : i + 10], i) for i in range(0, 100, 10)]
    verdict = judge_values(case, lambda: blocks, floats=True)
    assert verdict.alpha == pytest.approx(3)
    assert verdict.residual is not None
    assert verdict.residual < 1e-15


def _texts(found: object) -> object:
    """All but the floats, which depend on the order of additions."""
    if isinstance(found, dict):
        return {key: _texts(value) for key, value in found.items()}
    return [_texts(value) for value in found] if isinstance(found, tuple) else _other(found)


def _other(value: object) -> object:
    return float if isinstance(value, float) else value


def _numbers(found: object) -> list[float]:
    if isinstance(found, dict | tuple):
        return [
            n for value in (found.values() if isinstance(found, dict) else found) for n in _numbers(value)
        ]
    return [found] if isinstance(found, float) else []
