"""Reading a case once: what is kept, for how long, and what is too large to be kept."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest

from regress.golden.golden_case import GoldenCase
from regress.golden.golden_directory import GoldenStore
from regress.replay import case_reads as module
from regress.replay.case_reads import trajectories_of, truth_of

GOLDEN = Path(__file__).parents[3] / "golden"
WHERE = "step_000000"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that every read of a case is added to."""
    found: list[str] = []
    steps, truth = GoldenCase.trajectories, GoldenCase.truth

    def counted_steps(case: GoldenCase) -> object:
        found.append("trajectories")
        return steps(case)

    def counted_truth(case: GoldenCase, where: str) -> object:
        found.append(where)
        return truth(case, where)

    monkeypatch.setattr(GoldenCase, "trajectories", counted_steps)
    monkeypatch.setattr(GoldenCase, "truth", counted_truth)
    return found


def test_a_case_is_read_once_and_another_opening_of_it_again(reads: list[str]) -> None:
    """A case that was opened again may have been recorded anew in between."""
    case, again = GoldenStore(GOLDEN).case("dense"), GoldenStore(GOLDEN).case("dense")
    for _ in range(2):
        assert trajectories_of(case)
        assert truth_of(case)(WHERE)
    assert reads == ["trajectories", WHERE]
    with pytest.raises(ValueError, match="read-only"):
        truth_of(case)(WHERE)["loss"]["loss"][...] = 0.0
    assert truth_of(again)(WHERE).keys() == truth_of(case)(WHERE).keys()
    trajectories_of(again)
    assert reads == ["trajectories", WHERE, WHERE, "trajectories"]


def test_nothing_is_kept_of_a_case_that_nobody_holds() -> None:
    case = GoldenStore(GOLDEN).case("dense")
    values = truth_of(case)(WHERE)["loss"]
    gone = weakref.ref(next(iter(values.values())))
    del case, values
    gc.collect()
    assert gone() is None


def test_a_large_case_is_not_kept(reads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIMIT", 1000)
    case = GoldenStore(GOLDEN).case("dense")
    for _ in range(2):
        assert truth_of(case)(WHERE)
    assert reads == [WHERE, WHERE]
