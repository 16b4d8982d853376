"""Log-probs given logits: any logits in full precision hold, in any order of rows; anything coarser does not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from regress.compare.updates import logit_recomputation as given_logits
from regress.compare.updates.invariant_counts import Checked
from regress.compare.updates.logit_recomputation import (
    TokenValues,
    check_given_logits,
    expected_values,
    temperature_of,
)
from regress.dump.numpy_arrays import Array


def checked(
    logits: Array, rows: Array, ids: Array, log_probs: Array, entropy: Array, temperature: float
) -> Checked:
    known = Checked()
    tokens = TokenValues(np.arange(len(ids)), ids, {"log_probs": log_probs, "entropy": entropy})
    check_given_logits(known, logits, rows, tokens, temperature, str)
    return known


@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.tuples(st.integers(1, 12), st.integers(2, 40)),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
    temperature=st.sampled_from([0.7, 1.0, 2.0]),
)
def test_single_precision_holds_in_any_order_of_rows(
    seed: int, size: tuple[int, int], scale: float, temperature: float
) -> None:
    rng = np.random.default_rng(seed)
    wide = rng.normal(size=size).astype(np.float32) * np.float32(scale)
    ids, order = rng.integers(0, size[1], size[0]), rng.permutation(size[0])
    x = wide / np.float32(temperature)
    x = x - x.max(1, keepdims=True)
    log_p = x - np.log(np.exp(x).sum(1, keepdims=True))
    log_probs = log_p[np.arange(size[0]), ids]
    entropy = -(np.exp(log_p) * log_p).sum(1)
    found = checked(wide[order], order, ids, log_probs, entropy, temperature)
    assert found.count == 2 * size[0]
    assert not found.wrong


@given(seed=st.integers(0, 2**32 - 1), index=st.integers(0, 5))
def test_one_token_off_by_half_precision_is_found(seed: int, index: int) -> None:
    rng = np.random.default_rng(seed)
    wide = rng.normal(size=(6, 20)) * 3
    ids = rng.integers(0, 20, 6)
    right, _ = expected_values(wide, ids)
    log_probs = right["log_probs"].astype(np.float32)
    assume(
        abs(log_probs[index]) > 0.05
    )  # of a probability near 1, half precision loses less than single precision may
    log_probs[index] *= 1 + 2.0**-9
    found = checked(wide, np.arange(6), ids, log_probs, right["entropy"], 1.0)
    assert found.wrong == 1
    assert found.broken[0].where == f"log_probs {index}"


def test_an_entropy_alone_is_found() -> None:
    rng = np.random.default_rng(0)
    wide, ids = rng.normal(size=(6, 20)), rng.integers(0, 20, 6)
    right, _ = expected_values(wide, ids)
    found = checked(wide, np.arange(6), ids, right["log_probs"], right["entropy"] + 1e-4, 1.0)
    assert found.wrong == 6


def test_logits_before_a_cap_say_nothing() -> None:
    rng = np.random.default_rng(0)
    wide, ids = rng.normal(size=(6, 20)) * 10, rng.integers(0, 20, 6)
    capped, _ = expected_values(3 * np.tanh(wide / 3), ids)
    assert not checked(wide, np.arange(6), ids, capped["log_probs"], capped["entropy"], 1.0).count


def test_of_many_logits_some_rows_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(given_logits, "ELEMENTS", 60)
    rng = np.random.default_rng(0)
    wide, ids = rng.normal(size=(50, 20)), rng.integers(0, 20, 50)
    right, _ = expected_values(wide, ids)
    assert checked(wide, np.arange(50), ids, right["log_probs"], right["entropy"], 1.0).count == 6


def test_logits_of_minus_infinity_are_impossible_tokens() -> None:
    wide = np.array([[0.0, -np.inf, 1.0]])
    right, size = expected_values(wide, np.array([2]))
    assert np.isfinite([right["log_probs"][0], right["entropy"][0], size[0]]).all()


@pytest.mark.parametrize("config", [{}, {"rollout_worker": {}}, {"rollout_worker": {"temperature": "hot"}}])
def test_an_unknown_temperature_is_none(config: dict[str, dict[str, str]]) -> None:
    assert temperature_of(config) is None
