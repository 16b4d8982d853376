"""The update whose records the tests of this folder break, and the verdicts on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from regress.compare.updates.golden import judge_update
from regress.compare.verdicts.verdict import Verdict
from regress.dump.record import Record
from regress.layout import BatchPlan
from tests.unit.compare.updates.edits import LENGTHS, PACKED, PADDED


@pytest.fixture(params=[PADDED, PACKED], ids=["padded", "packed"])
def plan(request: pytest.FixtureRequest) -> BatchPlan:
    found: BatchPlan = request.param
    return found


@pytest.fixture
def world(make_world: Callable[..., Any]) -> Any:
    return make_world(LENGTHS, seed=1)


@pytest.fixture
def faults(world: Any, tolerances: Any) -> Callable[..., list[Verdict]]:
    """Every verdict that is not ok."""

    def of(records: Sequence[Record], plan: BatchPlan, dtype: str | None = None) -> list[Verdict]:
        verdicts = judge_update(
            records,
            world.truth,
            world.frame,
            tolerances,
            place=(0, None),
            planned=world.planned(plan),
            dtype=None if dtype is None else lambda quantity, name: dtype,
            text=lambda token: f"<{token}>",
        )
        return [v for v in verdicts if not v.ok]

    return of
