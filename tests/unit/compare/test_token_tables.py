"""Token tables of a report: whatever the layout, however damaged the dump."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regress.compare.verdicts.tolerance import Tolerance
from regress.dump.coordinates import Place
from regress.dump.record import Record, replace_tensors
from regress.layout import BatchPlan
from regress.report import token_values
from regress.report.token_values import TokenTable, token_table

PLANS = [
    BatchPlan(micro_batch_size=2),
    BatchPlan(micro_batch_size=3, padding_side="left"),
    BatchPlan("packed", micro_batch_size=4),
]


def table(world: Any, records: Sequence[Record], tolerances: Callable[[str], Tolerance]) -> TokenTable:
    return token_table(
        "dense/x", Place(0), records, world.truth, world.frame, tolerances, lambda token: f"<{token}>"
    )


@settings(deadline=None)
@given(st.sampled_from(PLANS), st.integers(1, 3), st.lists(st.integers(1, 7), min_size=2, max_size=6))
def test_an_equal_dump_of_any_layout_shows_golden_values(
    make_world: Any, tolerances: Any, plan: BatchPlan, ranks: int, lengths: list[int]
) -> None:
    world = make_world(lengths)
    found = table(world, world.records(plan, ranks), tolerances)
    assert found.samples == [f"{group}/{run}" for group, run in world.frame.samples]
    assert (found.lengths, found.left_out) == (lengths, 0)
    assert found.mask == world.loss_mask.tolist()
    assert found.text == [f"<{token}>" for token in found.ids]
    for values in found.values:
        assert values.actual == values.golden
        (golden,) = world.truth[values.quantity].values()
        assert values.golden == [
            v if wanted else None for v, wanted in zip(golden.tolist(), found.mask, strict=True)
        ]
        assert values.tolerance == pytest.approx(1e-12 * np.abs(golden).max(initial=0))
    assert [values.quantity for values in found.values][:3] == ["advantages", "weights", "log_probs"]


def test_of_several_values_of_a_token_the_worst_is_shown_and_none_is_nan(
    make_world: Any, tolerances: Any
) -> None:
    world = make_world([5, 6, 4, 5])
    plan = BatchPlan(micro_batch_size=2)
    first, *others = [r for r in world.records(plan) if r.type == "forward_data"]
    wrong = replace_tensors(first, {"log_probs": first.tensors["log_probs"] + 7})
    for records in ([wrong, first], [first, wrong]):  # and nothing of the other microbatch
        (found,) = [v for v in table(world, records, tolerances).values if v.quantity == "log_probs"]
        seen = {
            None
            if golden is None or actual is None
            else "nan"
            if math.isnan(actual)
            else round(actual - golden, 9)
            for golden, actual in zip(found.golden, found.actual, strict=True)
        }
        assert seen == {None, 7.0, "nan"}
    assert others


def test_what_does_not_fit_its_layout_is_left_to_the_verdicts(make_world: Any, tolerances: Any) -> None:
    world = make_world([5, 6])
    records = world.records(BatchPlan(micro_batch_size=2))
    broken = [
        replace_tensors(r, {"log_probs": np.zeros((1, 1))}) for r in records if r.type == "forward_data"
    ]
    lost = [replace(r, meta={}) for r in records if r.type == "forward_data"]
    for some in (broken, lost, []):
        (found,) = [v for v in table(world, some, tolerances).values if v.quantity == "log_probs"]
        assert all(math.isnan(v) for v in found.actual if v is not None)


def test_the_samples_that_are_furthest_off_stay(
    make_world: Any, tolerances: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world([6, 6, 6, 6])
    records = world.records(BatchPlan(micro_batch_size=1))
    changed = [
        replace_tensors(r, {"entropy": r.tensors["entropy"] + r.micro}) if r.type == "forward_data" else r
        for r in records
    ]
    monkeypatch.setattr(token_values, "LIMIT", 13)
    found = table(world, changed, tolerances)
    assert (found.samples, found.left_out) == (["001/0", "001/1"], 2)
    assert len(found.ids) == len(found.values[0].golden) == 12
