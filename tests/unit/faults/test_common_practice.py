"""Checks of common practice, measured on verdicts."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from regress.compare.verdicts.verdict import Status, Verdict
from regress.dump.coordinates import Place
from tests.faults.fault import COMMON
from tests.faults.trials.common_practice import LIMITS, measured, noticed


def verdict(quantity: str, golden: Any, actual: Any, *, micro: int | None = None) -> Verdict:
    golden, actual = np.asarray(golden, float), np.asarray(actual, float)
    error, norm = actual - golden, float(np.linalg.norm(golden))
    alpha = float((golden * actual).sum() / (golden * golden).sum())
    return Verdict(
        Status.OK,
        quantity,
        quantity,
        Place(0, None, 0, micro),
        relative=float(abs(error).max() / abs(golden).max()),
        relative_l2=float(np.linalg.norm(error) / norm),
        scale=float(abs(golden).max()),
        count=golden.size,
        mean_error=float(error.mean()),
        max_relative=float((abs(error) / abs(golden)).max()),
        alpha=alpha,
        residual=float(np.linalg.norm(actual - alpha * golden) / norm),
    )


def case(weights: Any, losses: Any) -> tuple[Any, Any]:
    truth = {
        "weights": {"weights": np.asarray(weights)},
        "token_loss": {"elementwise_loss": np.asarray(losses)},
    }
    mesh = SimpleNamespace(coordinates=lambda rank: {"tp": 0})
    update = SimpleNamespace(step=0, update=None, where="step_000000", ranks=SimpleNamespace(mesh=mesh))
    return SimpleNamespace(truth=lambda where: truth), [update]


def test_every_check_has_a_limit_and_a_sentence() -> None:
    assert {*LIMITS} == {*COMMON}


def test_the_loss_is_that_of_all_microbatches() -> None:
    opened, plan = case([0.5, 0.5], [2.0, 4.0])
    shares = [verdict("loss", 1.0, 1.1, micro=0), verdict("loss", 2.0, 1.93, micro=1)]
    assert measured(opened, plan, shares)["loss"] == pytest.approx(0.01)


def test_gradients_are_judged_by_the_worst_and_those_that_are_rounding_are_left_out() -> None:
    golden = np.array([3.0, 4.0])
    turned = np.array([4.0, 3.0])
    verdicts = [
        verdict("gradient", golden, 2 * golden),
        verdict("gradient", golden, turned),
        verdict("gradient", golden * 1e-12, -golden * 1e-12),
    ]
    found = measured(*case([], []), verdicts)
    assert found["1 - cosine"] == pytest.approx(1 - 24 / 25)
    assert found["relative L2"] == pytest.approx(1.0)


def test_log_probs_have_a_mean_and_a_worst() -> None:
    found = measured(*case([], []), [verdict("log_probs", [-1.0, -2.0], [-1.1, -1.9])])
    assert found["mean log-prob"] == pytest.approx(0.0, abs=1e-12)
    assert found["relative log-prob"] == pytest.approx(0.1)


def test_what_is_not_there_is_not_measured() -> None:
    assert measured(*case([], []), []) == {}
    assert noticed({}) == {}


@pytest.mark.parametrize(("value", "found"), [(0.049, False), (0.051, True), (math.nan, True)])
def test_values_at_the_limit(value: float, found: bool) -> None:
    assert noticed({"loss": value})["loss 5 %"] is found
