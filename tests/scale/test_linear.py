"""The work of a comparison grows with the number of ranks, and not with its square; counted, not timed."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_dumps import Made, shard

from regress.compare.alignment.shard_overlap import IntervalIndex
from regress.compare.dumps.comparison import compare_dumps
from regress.compare.dumps.comparison_plan import plan_units
from regress.compare.dumps.comparison_unit import Unit
from regress.dump import dump_reader
from regress.layout import ShardLayout

FEW, MANY = 4, 16


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Dumps of so many ranks, of two samples each and as large a shard on each."""
    known: dict[tuple[int, int, float], str] = {}

    def make(ranks: int, noise: float = 0.0, size: int | None = None) -> str:
        size = size or ranks
        if (ranks, size, noise) not in known:
            params = {"embed.weight": (10 * size, 4), "norm.weight": (6 * size,)}
            made = Made(ranks, samples=2 * size, params=params, noise=noise)
            known[ranks, size, noise] = str(made.write(tmp_path_factory.mktemp("dump")))
        return known[ranks, size, noise]

    return make


def lines_of(work: Callable[[], object]) -> int:
    """Lines of this package that were executed, and turns of loops."""
    count = 0

    def within(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return within

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        return within if "/regress/" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize(
    "noise", [pytest.param(0.0, marks=pytest.mark.extended), 2e-6], ids=["equal", "different"]
)
def test_lines_executed(dumps: Callable[..., str], noise: float) -> None:
    few, many = (
        lines_of(lambda ranks=ranks: compare_dumps(dumps(ranks), dumps(ranks, noise)))  # type: ignore[misc]
        for ranks in (FEW, MANY)
    )
    assert few > 10_000
    assert many / few < 1.1 * MANY / FEW


def test_lines_executed_when_shards_and_samples_lie_elsewhere(dumps: Callable[..., str]) -> None:
    few, many = (
        lines_of(lambda ranks=ranks: compare_dumps(dumps(ranks), dumps(3 * ranks // 4, size=ranks)))  # type: ignore[misc]
        for ranks in (FEW, MANY)
    )
    assert many / few < 1.2 * MANY / FEW


def test_files_opened(dumps: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    opened: Counter[str] = Counter()
    real = dump_reader.map_file

    def counted(path: Path) -> Any:
        opened[path.parent.name] += 1
        return real(path)

    monkeypatch.setattr(dump_reader, "map_file", counted)
    found = []
    for ranks in (FEW, MANY):
        opened.clear()
        compare_dumps(dumps(ranks), dumps(ranks))
        found.append({record_type: count / ranks for record_type, count in opened.items()})
    assert found[0] == found[1]
    assert found[0]["param"] == 1  # for both sides, which are one folder; its header and its values


def test_a_shard_is_compared_with_those_that_hold_its_elements(dumps: Callable[..., str]) -> None:
    units = [u for u in plan_units(dumps(16), dumps(12, size=16)).units if isinstance(u, Unit)]
    counts = [len(unit.records) for unit in units if unit.record_type == "param"]
    assert len(counts) == 12
    assert max(counts) <= 3
    same = [
        u for u in plan_units(dumps(16), dumps(16)).units if isinstance(u, Unit) and u.record_type == "param"
    ]
    assert [unit.records for unit in same] == [(unit.record,) for unit in same]


@st.composite
def layouts(draw: st.DrawFn) -> list[ShardLayout]:
    """Shards of a tensor, of one or several ranges along each dimension; they may overlap."""
    shape = (draw(st.integers(1, 12)), draw(st.integers(1, 8)))
    found = []
    for _ in range(draw(st.integers(1, 8))):
        ranges = []
        for size in shape:
            here = draw(st.lists(st.booleans(), min_size=size, max_size=size))
            ranges.append(tuple((i, i + 1) for i, chosen in enumerate(here) if chosen))
        found.append(ShardLayout(shape, tuple(ranges)))
    return found


@settings(deadline=None)
@given(layouts())
def test_nobody_near_is_overlooked_and_nobody_else_found(found: list[ShardLayout]) -> None:
    near = IntervalIndex(found)
    for layout in found:
        elements = {*layout.indices().tolist()}
        common = [i for i, other in enumerate(found) if elements & {*other.indices().tolist()}]
        assert near.of(layout.ranges) == common


def test_few_of_many_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0
    from regress.compare.alignment import shard_overlap

    real = shard_overlap._meet

    def counted(*arguments: Any) -> bool:
        nonlocal looked
        looked += 1
        return real(*arguments)

    monkeypatch.setattr(shard_overlap, "_meet", counted)
    near = IntervalIndex([shard((6400, 3), rank, 64) for rank in range(64)])
    for rank in range(48):
        assert len(near.of(shard((6400, 3), rank, 48).ranges)) <= 3
    assert looked <= 3 * 48
