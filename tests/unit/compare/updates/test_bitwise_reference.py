"""A bitwise reference: one bit of difference is a fault, and another layout has no bytes to compare."""

from __future__ import annotations

from typing import Any

import numpy as np

from regress.compare.update_judge import judge_bitwise
from regress.compare.verdicts.verdict import Status
from regress.dump.coordinates import Place
from regress.layout import BatchPlan
from tests.unit.compare.updates.edits import PADDED, changed, last_loss_token, place_of


def test_one_ulp_in_the_bitwise_tier(world: Any, plan: BatchPlan, faults: Any) -> None:
    records = world.records(plan, dtype="float32")

    def change(tensors: dict[str, Any]) -> None:
        tensors["model.norm.weight"].view(np.uint32)[1] += 1

    moved = changed(records, "gradient", None, change)
    (verdict,) = [v for v in judge_bitwise(moved, records, world.frame, place=Place(0)) if not v.ok]
    assert (verdict.status, verdict.quantity, verdict.place) == (Status.DRIFT, "gradient", Place(0, None, 0))
    assert (verdict.over, verdict.count) == (1, 3)
    assert verdict.worst is not None
    assert (verdict.worst.where, verdict.worst.ulp) == ("element [1] of model.norm.weight", 1.0)


def test_one_ulp_of_a_token_in_the_bitwise_tier(world: Any, plan: BatchPlan) -> None:
    records = world.records(plan)
    position = last_loss_token(world, 0)
    micro, row, col = place_of(world, plan, 0, position)

    def change(tensors: dict[str, Any]) -> None:
        tensors["entropy"].view(np.uint64)[row, col] += 1

    moved = changed(records, "forward_data", micro, change)
    (verdict,) = [v for v in judge_bitwise(moved, records, world.frame, place=Place(0)) if not v.ok]
    assert (verdict.quantity, verdict.over) == ("entropy", 1)
    assert verdict.worst is not None
    assert verdict.worst.where.startswith(f"sample 000/0, position {position}, token ")


def test_a_twin_of_another_layout_has_no_bytes_to_compare(world: Any) -> None:
    found = judge_bitwise(
        world.records(PADDED), world.records(BatchPlan(micro_batch_size=2, padding_side="left")), world.frame,
        place=Place(0),
    )  # fmt: skip
    wrong = [v for v in found if not v.ok]
    assert {v.status for v in wrong} == {Status.COVERAGE}
    assert wrong[0].detail.endswith(
        "lie elsewhere than in its bitwise reference, so bytes cannot be compared"
    )
    assert {v.place.micro for v in wrong} == {0, 1}, "the third has one row and no padding"
    assert {v.quantity for v in found if v.place.micro is None} == {
        *("coverage", "gradient", "grad_norm", "param", "optimizer")
    }


def test_a_twin_sees_missing_and_additional_records(world: Any, plan: BatchPlan) -> None:
    records = world.records(plan)
    fewer = [r for r in records if r.type != "param"]
    lost = [v for v in judge_bitwise(fewer, records, world.frame, place=Place(0)) if not v.ok]
    assert {(v.status, v.quantity) for v in lost} == {(Status.MISSING, "param")}
    more = [v for v in judge_bitwise(records, fewer, world.frame, place=Place(0)) if not v.ok]
    assert [(v.status, v.quantity, v.name) for v in more] == [(Status.EXTRA, "coverage", "param of rank 0")]


def test_a_twin_sees_padding(world: Any) -> None:
    layout = world.layouts(PADDED)[0]
    row, col = np.argwhere(~layout.attention_mask)[0]

    def change(tensors: dict[str, Any]) -> None:
        tensors["entropy"][row, col] = 1e-300

    records = world.records(PADDED)
    found = judge_bitwise(changed(records, "forward_data", 0, change), records, world.frame, place=Place(0))
    (verdict,) = [v for v in found if not v.ok]
    assert verdict.worst is not None
    assert verdict.worst.where == f"row {row}, column {col} (padding)"
