"""Rules over rows of tokens alone: where old log-probs come from, and what has to stay unsaid."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regress.interop.modes.client_datums import Client
from regress.interop.modes.discrepancy import Discrepancy
from regress.interop.modes.mode_rows import MASK, OLD, Floats, ModeRow
from regress.interop.modes.step_context import StepContext
from regress.interop.modes.token_value_rules import values


def row(key: tuple[str, int], seed: int, size: int = 9) -> ModeRow:
    rng = np.random.default_rng(seed)
    mask = (np.arange(size) >= 3).astype(np.float64)
    found = ModeRow(key, rng.integers(0, 50, size))
    found.values = {
        MASK: mask,
        OLD: -rng.random(size) * mask,
        "sampler": -rng.random(size) * mask,
        "advantages": (rng.random() + 0.5) * mask,
    }
    return found


def sent(whole: ModeRow, **changed: Floats) -> ModeRow:
    known = {name: whole.values[name].copy() for name in (MASK, OLD, "advantages")}
    return ModeRow(("datum", whole.key[1]), whole.tokens, {**known, **changed})


def context_of(rows: list[ModeRow], datums: list[ModeRow]) -> StepContext:
    return StepContext(0, rows, Client(datums))


def found(rows: list[ModeRow], datums: list[ModeRow]) -> list[Discrepancy]:
    return [*values(context_of(rows, datums))]


def rows(count: int = 4) -> list[ModeRow]:
    return [row((f"g{n // 2}", n), n) for n in range(count)]


def test_healthy_rows_say_nothing() -> None:
    assert found(rows(), [sent(one) for one in rows()]) == []


def test_log_probs_of_the_sampler_are_named() -> None:
    datums = [sent(one, **{OLD: one.values["sampler"]}) for one in rows()]
    assert [one.rule for one in found(rows(), datums)] == ["old-log-probs-of-the-sampler"]


def test_log_probs_that_are_lost_are_named() -> None:
    datums = [sent(one, **{OLD: one.values[OLD] * 0}) for one in rows()]
    assert [one.rule for one in found(rows(), datums)] == ["old-log-probs-lost"]


@given(seed=st.integers(0, 99), count=st.integers(1, 6))
def test_values_without_a_pattern_have_no_cause(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    mine = rows(count)
    datums = [sent(one, **{OLD: -rng.random(9) * one.values[MASK]}) for one in mine]
    assert found(mine, datums) == []


@given(seed=st.integers(0, 99))
def test_one_wrong_value_among_shifted_ones_is_no_shift(seed: int) -> None:
    rng = np.random.default_rng(seed)
    mine = rows()
    moved = [np.concatenate([[0.0], one.values[OLD][:-1]]) for one in mine]
    moved[int(rng.integers(4))][int(rng.integers(4, 9))] += 0.5
    assert found(mine, [sent(one, **{OLD: old}) for one, old in zip(mine, moved, strict=True)]) == []


def test_a_shift_of_constant_log_probs_is_no_proof() -> None:
    mine = [replace(one, values={**one.values, OLD: -0.5 * one.values[MASK]}) for one in rows()]
    moved = [np.concatenate([[0.0], one.values[OLD][:-1]]) for one in mine]
    assert found(mine, [sent(one, **{OLD: old}) for one, old in zip(mine, moved, strict=True)]) == []


@pytest.mark.parametrize("by", [1, -1])
def test_a_wire_without_masks_is_no_fault(by: int) -> None:
    datums = [sent(one, **{MASK: np.ones(9)}) for one in rows()]
    assert found(rows(), datums) == []
    for one in datums:
        one.values["advantages"][:] = by
    assert "mask-lost" in [one.rule for one in found(rows(), datums)]


def test_factors_that_differ_between_datums_have_no_cause() -> None:
    datums = [sent(one, advantages=one.values["advantages"] * (1.1 + n)) for n, one in enumerate(rows())]
    assert found(rows(), datums) == []
