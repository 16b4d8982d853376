"""Records that are missing, duplicated or of other samples: each is named, with the tokens that it concerns."""

from __future__ import annotations

from typing import Any

import pytest

from regress.compare.update_judge import judge_update
from regress.compare.verdicts.verdict import Status
from regress.dump.coordinates import Place
from regress.dump.record import Record
from regress.layout import BatchPlan
from tests.unit.compare.updates.edits import LENGTHS, PADDED, needed


@pytest.mark.parametrize(
    "record_type", ["batch_inputs", "activations", "forward_data", "is_loss_debug", "loss"]
)
def test_a_record_missing(world: Any, plan: BatchPlan, faults: Any, record_type: str) -> None:
    records = [r for r in world.records(plan) if (r.type, r.micro) != (record_type, 1)]
    (gone,) = [r for r in world.records(plan) if (r.type, r.micro) == (record_type, 1)]
    found = faults(records, plan)
    first, *rest = found
    assert (first.status, first.quantity, first.name) == (Status.COVERAGE, "coverage", record_type)
    assert "was produced by no microbatch" in first.detail
    assert first.over == needed(world, record_type, 2, 3)
    assert {v.status for v in rest} == {Status.MISSING}
    assert {v.place for v in rest} == {Place(0, None, 0, 1)}
    assert len(rest) == len(gone.tensors)
    assert {v.detail for v in rest} == {f"{record_type} of rank 0 microbatch 1 was not recorded"}


@pytest.mark.parametrize("record_type", ["gradient", "param", "optimizer"])
def test_a_record_of_the_update_missing(world: Any, plan: BatchPlan, faults: Any, record_type: str) -> None:
    found = faults([r for r in world.records(plan) if r.type != record_type], plan)
    names = [*world.truth[record_type], *(["grad_norm"] if record_type == "gradient" else [])]
    assert sorted(v.name for v in found) == sorted(names)
    assert {v.status for v in found} == {Status.MISSING}
    assert {v.place for v in found} == {Place(0, None, 0)}


@pytest.mark.parametrize("gone", [[1], [0, 1, 2]])
def test_what_any_of_two_records_could_hold_must_be_in_one(
    world: Any, plan: BatchPlan, tolerances: Any, gone: list[int]
) -> None:
    """Log-probs and masks are in two kinds of records, of which a golden recording may have had one only."""
    names = {"batch_inputs": "response_mask", "log_probs": "log_probs"}
    truth = {quantity: {name: world.truth[quantity][name]} for quantity, name in names.items()}
    records = [
        Record(r.type, 0, {n: r.tensors[n] for n in names.values()}, r.meta, rank=0, micro=r.micro)
        for r in world.records(plan)
        if r.type == "forward_data" and r.micro not in gone
    ]
    planned = world.planned(plan)
    found = judge_update(records, truth, world.frame, tolerances, place=Place(0), planned=planned)
    wrong = [v for v in found if v.status is Status.MISSING]
    assert sorted((v.quantity, v.place.micro) for v in wrong) == [(q, micro) for q in names for micro in gone]


def test_a_whole_microbatch_missing(world: Any, plan: BatchPlan, faults: Any) -> None:
    found = faults([r for r in world.records(plan) if r.micro != 2], plan)
    assert {v.status for v in found} == {Status.COVERAGE, Status.MISSING}
    assert {v.quantity for v in found if v.status is Status.MISSING} >= {"batch_inputs", "log_probs", "loss"}
    assert {v.place.micro for v in found if v.status is Status.MISSING} == {2}


def test_nothing_recorded_at_all(world: Any, plan: BatchPlan, faults: Any) -> None:
    found = faults([], plan)
    assert {v.quantity for v in found} == {*world.truth, "coverage"}
    assert {v.status for v in found} == {Status.COVERAGE, Status.MISSING}


@pytest.mark.parametrize("record_type", ["forward_data", "gradient"])
def test_a_record_duplicated(world: Any, plan: BatchPlan, faults: Any, record_type: str) -> None:
    records = world.records(plan)
    twice = [*records, *[r for r in records if r.type == record_type and r.micro in (None, 0)]]
    (verdict,) = faults(twice, plan)
    assert (verdict.status, verdict.quantity) == (Status.COVERAGE, "coverage")
    assert verdict.place == Place(0)
    micro = " microbatch 0" if record_type == "forward_data" else ""
    assert (
        verdict.detail
        == f"{record_type} of rank 0{micro} was recorded 2 times; only the first record was compared"
    )


def test_a_microbatch_too_many(world: Any, plan: BatchPlan, faults: Any) -> None:
    records = world.records(plan)
    again = [Record(r.type, 0, r.tensors, r.meta, rank=0, micro=7) for r in records if r.micro == 1]
    found = faults([*records, *again], plan)
    assert {v.quantity for v in found} == {"coverage"}
    assert [v.detail for v in found if v.status is Status.EXTRA] == [
        f"{r.type} of rank 0 microbatch 7 was recorded, but is not part of the plan" for r in again
    ]
    doubled = [v for v in found if v.status is Status.COVERAGE]
    assert {v.name for v in doubled} == {r.type for r in again}
    assert doubled[0].detail.startswith("sample 001/0, position 0, token ")
    assert "was produced twice: microbatches 1 and 7 (as were 8 other tokens)" in doubled[0].detail


def test_the_last_microbatch_written_twice(world: Any, plan: BatchPlan, faults: Any) -> None:
    """In place of the last but one: its file has its name, but the tokens of the last."""
    records = [r for r in world.records(plan) if r.micro != 1]
    again = [Record(r.type, 0, r.tensors, r.meta, rank=0, micro=1) for r in records if r.micro == 2]
    found = faults([*records, *again], plan)
    assert {(v.status, v.quantity) for v in found} == {(Status.COVERAGE, "coverage")}
    assert len(found) == len(again)
    begin = {
        record_type: 0 if needed(world, record_type, 2) == 6 else 6 - needed(world, record_type, 2)
        for record_type in (v.name for v in found)
    }
    assert all(f"sample 001/0, position {begin[v.name]}, token" in v.detail for v in found)
    again_all = world.frame.lengths[4]
    assert all(v.over == needed(world, v.name, 2, 3) + again_all for v in found), "all tokens that came again"
    assert all("was produced by no microbatch" in v.detail for v in found)


def test_a_rank_that_computes_the_tokens_of_another(make_world: Any, tolerances: Any) -> None:
    world, plan = make_world(LENGTHS), PADDED
    planned = world.planned(plan, ranks=2)
    records = [r for r in world.records(plan, ranks=2) if (r.rank, r.micro) != (1, 0)]
    records += [
        Record(r.type, 0, r.tensors, r.meta, rank=1, micro=0)
        for r in records
        if (r.rank, r.micro) == (0, 1) and r.type == "loss"
    ]
    found = judge_update(records, world.truth, world.frame, tolerances, place=Place(0), planned=planned)
    (verdict,) = [v for v in found if v.status is Status.COVERAGE and v.name == "loss"]
    assert verdict.over == needed(world, "loss", 2, 3) + world.frame.lengths[4]
    records.append(next(r for r in world.records(plan, ranks=2) if r.type == "loss" and r.rank == 1))
    found = judge_update(
        [r for r in records if r.rank == 0 or r.type == "loss"],
        world.truth,
        world.frame,
        tolerances,
        place=Place(0),
        planned=planned,
    )
    assert any("recorded 2 times" in v.detail for v in found)


def test_a_layout_of_other_samples(world: Any, plan: BatchPlan, faults: Any) -> None:
    records = [
        Record(r.type, 0, r.tensors, {**r.meta, "samples": [["alien", 0]] * 2}, rank=0, micro=0)
        if (r.type, r.micro) == ("forward_data", 0)
        else r
        for r in world.records(plan)
    ]
    found = faults(records, plan)
    assert {v.status for v in found} == {Status.COVERAGE}
    assert {v.quantity for v in found} == {"coverage", "batch_inputs", "log_probs", "entropy"}
    assert found[1].detail == (
        "forward_data of rank 0 microbatch 0 holds sample alien/0, which does not belong to this update"
    )


def test_nothing_compared_is_a_fault(make_world: Any, tolerances: Any) -> None:
    """Without a single loss token no log-prob could be wrong."""
    world, plan = make_world([1, 1]), BatchPlan()
    verdicts = judge_update(
        world.records(plan),
        world.truth,
        world.frame,
        tolerances,
        place=Place(0),
        planned=world.planned(plan),
    )
    found = {v.name: v.detail for v in verdicts if not v.ok}
    assert found["log_probs"] == "not one element of log_probs was compared, so it could not fail"
    assert {v.quantity for v in verdicts if not v.ok} == {"coverage"}
