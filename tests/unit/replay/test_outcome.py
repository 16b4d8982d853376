"""Outcome of a replay, as processes share it."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from regress.compare.quantities import NEW
from regress.compare.verdicts.verdict import Status, Verdict, Worst
from regress.dump.coordinates import Place
from regress.replay.replay_outcome import Outcome, ReplayOutcome

PLACE = Place(1, None, 0, 2)


def verdict(status: Status, quantity: str = "kl", place: Place = PLACE, **figures: float) -> Verdict:
    return Verdict(status, quantity, quantity, place, **figures)  # type: ignore[arg-type]  # figures are numbers


@settings(deadline=None)
@given(st.lists(st.floats(allow_nan=False), min_size=4, max_size=4), st.sampled_from(Status))
def test_a_shared_outcome_is_the_same_for_everybody(figures: list[float], status: Status) -> None:
    worst = Worst((0, 3), "sample 0/1, position 3", figures[0], -math.inf, figures[1], None)
    found = Verdict(
        status, "kl", "kl", PLACE, "x", worst, figures[2], figures[3], count=7, basis={"seeds": 5}
    )
    written = ReplayOutcome.of([found], {("step1/rank0/micro2", "kl")})
    assert ReplayOutcome.loads(written.dumps()) == written
    assert written.failed == ([] if status is Status.OK else [found])


def test_what_was_not_judged_is_told_once_of_a_replay() -> None:
    found = [Verdict(Status.OK, "metrics", "kept", Place(0, None, rank), NEW) for rank in (0, 1)]
    written = ReplayOutcome.of(found, ())
    assert ReplayOutcome.loads(written.dumps()).notes == [f"metrics/kept: {NEW}"]


def test_values_that_are_not_finite_are_shared() -> None:
    worst = Worst((0,), "x", math.nan, math.inf, math.nan, math.inf)
    written = ReplayOutcome.of([Verdict(Status.NONFINITE, "kl", "kl", PLACE, "x", worst, math.inf)], ())
    (found,) = ReplayOutcome.loads(written.dumps()).failed
    assert found.worst is not None
    assert math.isnan(found.worst.golden)
    assert math.isnan(found.worst.error)
    assert found.worst.actual == found.multiple == math.inf


def test_an_error_is_shared() -> None:
    assert ReplayOutcome.loads(ReplayOutcome(error="no policy").dumps()) == ReplayOutcome(error="no policy")


def test_what_fails_without_a_test_of_its_own_counts_for_the_coverage() -> None:
    tested = {("step1/rank0/micro2", "kl"), ("step1/coverage", "coverage")}
    known, unknown = verdict(Status.DRIFT), verdict(Status.EXTRA, "ratio")
    elsewhere = verdict(Status.MISSING, place=Place(1, None, 3, 0))
    unseen = verdict(Status.OK, "entropy")
    found = ReplayOutcome.of([known, unknown, elsewhere, unseen], tested).outcomes
    assert found["step1/rank0/micro2", "kl"].failed == [known]
    assert found["step1", "coverage"].failed == [unknown, elsewhere]
    assert found["step1/rank0/micro2", "entropy"].failed == []


def test_the_closest_call_is_the_passing_one_with_the_least_headroom() -> None:
    found = Outcome()
    calls = [verdict(Status.OK, multiple=m, count=2) for m in (0.0, 0.5, 0.25)]
    for call in [*calls, verdict(Status.DRIFT, multiple=3.0, count=2)]:
        found.add(call)
    assert found.closest == calls[1]
    assert (found.tensors, found.elements, len(found.failed)) == (4, 8, 1)
