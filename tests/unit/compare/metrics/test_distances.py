"""Distances of policies: estimators of the divergence that they estimate."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regress.compare.metrics.policy_distances import log_ratios
from regress.compare.verdicts.tensor_judge import judge_tensor
from regress.compare.verdicts.tolerance import EXACT, Tolerance
from regress.compare.verdicts.verdict import Verdict
from regress.dump.coordinates import Place
from regress.dump.numpy_arrays import DTYPES


def policies(seed: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs of a vocabulary under two policies."""
    logits = np.random.default_rng(seed).standard_normal((2, tokens))
    logits[1] = logits[0] + 0.3 * logits[1]
    return tuple(row - np.log(np.exp(row).sum()) for row in logits)


@pytest.mark.parametrize("seed", range(3))
def test_they_estimate_the_divergence(seed: int) -> None:
    golden, actual = policies(seed, 50)
    exact = float((np.exp(golden) * (golden - actual)).sum())
    drawn = np.random.default_rng(seed).choice(50, 200_000, p=np.exp(golden))
    found = log_ratios(actual[drawn], golden[drawn]).distances()
    assert found is not None
    assert found["k1"] == pytest.approx(exact, rel=0.1)
    assert found["k2"] == pytest.approx(exact, rel=0.1)
    assert found["k3"] == pytest.approx(exact, rel=0.02)
    assert found["mean_ratio"] == pytest.approx(1.0, abs=0.01)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-8, 0), st.floats(-8, 0)), min_size=1, max_size=20))
def test_the_definitions(pairs: list[tuple[float, float]]) -> None:
    actual, golden = (np.array(side) for side in zip(*pairs, strict=True))
    found = log_ratios(actual, golden).distances()
    ratios = [math.exp(a - g) for a, g in pairs]
    assert found == pytest.approx(
        {
            "k1": sum(g - a for a, g in pairs) / len(pairs),
            "k2": sum((a - g) ** 2 for a, g in pairs) / 2 / len(pairs),
            "k3": sum(r - 1 - (a - g) for r, (a, g) in zip(ratios, pairs, strict=True)) / len(pairs),
            "max_ratio": max(ratios),
            "mean_ratio": sum(ratios) / len(pairs),
            "clipped": sum(abs(r - 1) > 0.2 for r in ratios) / len(pairs),
        },
        abs=1e-12,
    )
    assert min(found["k2"], found["k3"]) >= 0


def test_nearly_equal_policies_are_told_apart() -> None:
    found = log_ratios(np.full(4, -1.0 + 1e-9), np.full(4, -1.0)).distances()
    assert found is not None
    assert found["k3"] == pytest.approx(5e-19, rel=1e-3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_what_is_not_finite_is_left_out(dtype: str) -> None:
    actual, golden = (
        np.array(side).astype(DTYPES[dtype])
        for side in ([-1.0, np.nan, -np.inf, -2.0], [-1.0, -1.0, -1.0, np.nan])
    )
    assert log_ratios(actual, golden).distances() == {
        "k1": 0.0, "k2": 0.0, "k3": 0.0, "max_ratio": 1.0, "mean_ratio": 1.0, "clipped": 0.0
    }  # fmt: skip
    assert log_ratios(actual[1:], golden[1:]).distances() is None


def test_numbers_that_are_no_log_probs_have_none() -> None:
    ones = np.ones(2, np.int64)
    verdict = judge_tensor(ones, ones, EXACT, quantity="log_probs", name="log_probs", place=Place(0))
    assert verdict.distances is None


def test_verdicts_on_log_probs_tell_them() -> None:
    def judge(quantity: str) -> Verdict:
        golden, actual = np.array([[-1.0, -2.0]]), np.array([[-1.5, -2.0]])
        return judge_tensor(actual, golden, Tolerance(1e-3), quantity=quantity, name=quantity, place=Place(0))

    verdict = judge("log_probs")
    assert verdict.distances is not None
    assert verdict.distances["k1"] == 0.25
    assert verdict.distances["clipped"] == 0.5
    assert verdict.distances["max_ratio"] == 1.0
    assert Verdict.from_json(verdict.to_json()) == verdict
    assert judge("entropy").distances is None
