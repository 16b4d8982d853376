"""Values of tokens that are off: each fails with the right verdict, at its token, and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from regress.compare.diagnosis.failure_context import FailureContext
from regress.compare.update_judge import judge_update
from regress.compare.verdicts.verdict import Status
from regress.dump.coordinates import Place
from regress.dump.record import Record
from regress.layout import BatchPlan
from tests.unit.compare.updates.edits import PADDED, changed, last_loss_token, place_of


def test_one_token_off_by_one(world: Any, plan: BatchPlan, faults: Any) -> None:
    micro, row, col = place_of(world, plan, sample=2, position=4)

    def change(tensors: dict[str, Any]) -> None:
        tensors["input_ids"][row, col] += 1

    (verdict,) = faults(changed(world.records(plan), "batch_inputs", micro, change), plan)
    assert (verdict.status, verdict.quantity, verdict.name) == (Status.MASK, "batch_inputs", "input_ids")
    assert verdict.place == Place(0, None, 0, micro)
    assert (verdict.over, verdict.detail) == (1, f"1 of {verdict.count} elements differ")
    token = int(world.truth["batch_inputs"]["input_ids"][world.frame.offsets[2] + 4])
    assert verdict.worst.where == f"sample 001/0, position 4, token {token} '<{token}>'"
    assert (verdict.worst.golden, verdict.worst.actual) == (token, token + 1)


def test_one_token_off_by_one_in_8192(make_world: Any, tolerances: Any) -> None:
    world, plan = make_world([4096, 4096]), BatchPlan(layout="packed")

    def change(tensors: dict[str, Any]) -> None:
        tensors["input_ids"][0, 5000] += 1

    records = changed(world.records(plan), "batch_inputs", 0, change)
    found = judge_update(
        records, world.truth, world.frame, tolerances, place=Place(0), planned=world.planned(plan)
    )
    (verdict,) = [v for v in found if not v.ok]
    assert (verdict.status, verdict.over, verdict.count) == (Status.MASK, 1, 8192)
    assert verdict.worst is not None
    assert verdict.worst.where.startswith("sample 000/1, position 904, token ")


def test_one_log_prob_of_one_token_off(world: Any, plan: BatchPlan, faults: Any) -> None:
    position = last_loss_token(world, 3)
    micro, row, col = place_of(world, plan, 3, position)

    def change(tensors: dict[str, Any]) -> None:
        tensors["log_probs"][row, col] *= 1 + 1e-6

    (verdict,) = faults(changed(world.records(plan), "forward_data", micro, change), plan)
    assert (verdict.status, verdict.quantity, verdict.over) == (Status.DRIFT, "log_probs", 1)
    assert verdict.worst.index == (row, col)
    assert verdict.worst.where.startswith(f"sample 001/1, position {position}, token ")


def test_all_tokens_scaled_by_4_percent(world: Any, plan: BatchPlan, faults: Any) -> None:
    records = world.records(plan)
    for micro in range(len(world.layouts(plan))):
        records = changed(records, "forward_data", micro, lambda t: t.update(entropy=t["entropy"] * 1.04))
    found = faults(records, plan)
    assert [(v.status, v.quantity, v.place.micro) for v in found] == [
        (Status.DRIFT, "entropy", micro) for micro in range(len(world.layouts(plan)))
    ]
    assert sum(v.over for v in found) == world.loss_mask.sum()
    assert all(v.relative_l2 == pytest.approx(0.04) for v in found)


def test_two_rows_swapped(world: Any, faults: Any) -> None:
    def change(tensors: dict[str, Any]) -> None:
        for name in tensors:
            tensors[name] = tensors[name][[1, 0]]

    found = faults(changed(world.records(PADDED), "forward_data", 1, change), PADDED)
    assert {(v.status, v.quantity) for v in found} == {
        (Status.MASK, "batch_inputs"),
        (Status.DRIFT, "log_probs"),
        (Status.DRIFT, "entropy"),
    }
    assert {v.place.micro for v in found} == {1}
    assert found[0].quantity == "batch_inputs", "tokens come before what is computed from them"


def test_rows_swapped_together_with_their_layout_are_no_fault(world: Any, faults: Any) -> None:
    records = world.records(BatchPlan(micro_batch_size=2))
    for i, record in enumerate(records):
        if record.micro is None or record.type not in ("batch_inputs", "forward_data", "is_loss_debug"):
            continue
        meta: Any = record.meta
        rows = len(meta["layout"]["segments"])
        order = list(reversed(range(rows)))
        tensors = {n: a[order] if a.ndim == 2 else a for n, a in record.tensors.items()}
        segments = [[s[0], s[1], s[2], rows - 1 - s[3], s[4]] for s in meta["layout"]["segments"]]
        layout = {"shape": meta["layout"]["shape"], "segments": segments}
        records[i] = Record(
            record.type, 0, tensors, {**record.meta, "layout": layout}, rank=record.rank, micro=record.micro
        )
    assert faults(records, BatchPlan(micro_batch_size=2)) == []


def test_a_mask_flipped(world: Any, plan: BatchPlan, faults: Any) -> None:
    micro, row, col = place_of(world, plan, 4, last_loss_token(world, 4))

    def change(tensors: dict[str, Any]) -> None:
        tensors["response_mask"][row, col] ^= 1

    (verdict,) = faults(changed(world.records(plan), "forward_data", micro, change), plan)
    assert (verdict.status, verdict.quantity, verdict.name) == (
        Status.MASK,
        "batch_inputs",
        "forward_data/response_mask",
    )
    assert (verdict.worst.golden, verdict.worst.actual) == (1, 0)
    assert verdict.worst.where.startswith("sample 002/0, position 3")


def test_a_mask_flipped_in_padding(world: Any, faults: Any) -> None:
    layout = world.layouts(PADDED)[0]
    row, col = np.argwhere(~layout.attention_mask)[0]

    def change(tensors: dict[str, Any]) -> None:
        tensors["attention_mask"][row, col] = True

    (verdict,) = faults(changed(world.records(PADDED), "batch_inputs", 0, change), PADDED)
    assert (verdict.status, verdict.name) == (Status.MASK, "attention_mask")
    assert verdict.worst.where == f"row {row}, column {col} (padding)"


def test_an_off_by_one_shift(world: Any, plan: BatchPlan, faults: Any) -> None:
    records = changed(
        world.records(plan),
        "is_loss_debug",
        0,
        lambda t: t.update(advantages=np.roll(t["advantages"], -1, axis=1)),
    )
    (verdict,) = faults(records, plan)
    assert (verdict.status, verdict.quantity, verdict.place.micro) == (Status.DRIFT, "advantages", 0)
    shifted = changed(
        world.records(plan), "batch_inputs", 0, lambda t: t.update(position_ids=t["position_ids"] + 1)
    )
    (verdict,) = faults(shifted, plan)
    assert (verdict.status, verdict.name) == (Status.MASK, "position_ids")
    assert verdict.over == sum(world.frame.lengths[:2])


def test_nan_on_both_sides_at_different_positions(world: Any, plan: BatchPlan, faults: Any) -> None:
    position = last_loss_token(world, 0)
    flat = int(world.frame.offsets[0]) + position
    other = int(world.frame.offsets[2]) + last_loss_token(world, 2)
    records = world.records(plan)
    world.token("entropy")[flat] = np.nan
    micro, row, col = place_of(world, plan, 2, last_loss_token(world, 2))

    def change(tensors: dict[str, Any]) -> None:
        tensors["entropy"][row, col] = np.nan

    first, second = faults(changed(records, "forward_data", micro, change), plan)
    assert (first.status, second.status) == (Status.NONFINITE, Status.NONFINITE)
    assert (first.quantity, second.quantity) == ("entropy", "entropy")
    assert first.detail.startswith("golden NaN, actual finite")
    assert second.detail.startswith("golden finite, actual NaN")
    assert first.worst.where.startswith(f"sample 000/0, position {position}, token ")
    assert second.worst.where.startswith(f"sample 001/0, position {last_loss_token(world, 2)}, token ")
    assert other != flat


def test_nan_at_the_same_position_of_both_sides_passes(world: Any, plan: BatchPlan, faults: Any) -> None:
    world.token("entropy")[int(world.frame.offsets[0]) + last_loss_token(world, 0)] = np.nan
    assert faults(world.records(plan), plan) == []


def test_nan_in_padding(world: Any, faults: Any) -> None:
    layout = world.layouts(PADDED)[0]
    row, col = np.argwhere(~layout.attention_mask)[0]

    def change(tensors: dict[str, Any]) -> None:
        tensors["model.layers.0"][row, col, 2] = np.nan

    (verdict,) = faults(changed(world.records(PADDED), "activations", 0, change), PADDED)
    assert (verdict.status, verdict.name) == (Status.NONFINITE, "model.layers.0")
    assert verdict.detail == "NaN in padding, which no token covers"
    assert verdict.worst.where == f"row {row}, column {col} (padding), element [2]"


def test_without_explanations_the_verdicts_are_the_same(
    world: Any, tolerances: Any, plan: BatchPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever counts failures alone does not pay for what they have in common."""

    def move(tensors: dict[str, Any]) -> None:
        tensors["log_probs"] += 1.0

    records = changed(world.records(plan), "forward_data", 1, move)
    judge = partial(
        judge_update,
        records,
        world.truth,
        world.frame,
        tolerances,
        place=Place(0),
        planned=world.planned(plan),
    )
    explained = judge()
    assert any(verdict.affected is not None for verdict in explained)
    monkeypatch.setattr(FailureContext, "affected", None)
    assert judge(related=None) == [replace(verdict, affected=None) for verdict in explained]
