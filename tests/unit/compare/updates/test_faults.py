"""Faults of a replay: each must fail, with the right verdict, at the right coordinates, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from regress.compare.diagnosis.failure_context import FailureContext
from regress.compare.updates.bitwise_reference import judge_bitwise
from regress.compare.updates.golden import judge_update
from regress.compare.verdicts.verdict import Place, Status, Verdict
from regress.dump.record import Record
from regress.layout import BatchPlan

LENGTHS = (5, 2, 6, 3, 4)
PADDED = BatchPlan(micro_batch_size=2)
PACKED = BatchPlan(layout="packed", micro_batch_size=2)


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
        place=(0, None),
        planned=world.planned(plan),
    )
    explained = judge()
    assert any(verdict.affected is not None for verdict in explained)
    monkeypatch.setattr(FailureContext, "affected", None)
    assert judge(beside=None) == [replace(verdict, affected=None) for verdict in explained]


def changed(
    records: Sequence[Record], stage: str, micro: int | None, change: Callable[[dict[str, Any]], None]
) -> list[Record]:
    """The records with the tensors of one of them changed in place, on a copy."""
    result = []
    for record in records:
        if (record.type, record.micro) == (stage, micro):
            tensors = {name: array.copy() for name, array in record.tensors.items()}
            change(tensors)
            record = Record(record.type, 0, tensors, record.meta, rank=record.rank, micro=record.micro)
        result.append(record)
    return result


def place_of(world: Any, plan: BatchPlan, sample: int, position: int) -> tuple[int, int, int]:
    """Microbatch, row and column of a token."""
    for micro, layout in enumerate(world.layouts(plan)):
        for s in layout.segments:
            if s.sample == sample:
                return micro, s.row, s.col + position
    raise AssertionError


def needed(world: Any, stage: str, *samples: int) -> int:
    """Tokens of some samples that the records of a stage must have: values of the loss belong to loss tokens."""
    if stage in ("batch_inputs", "activations"):
        return sum(world.frame.lengths[i] for i in samples)
    offsets = world.frame.offsets
    return sum(int(world.loss_mask[offsets[i] : offsets[i + 1]].sum()) for i in samples)


def last_loss_token(world: Any, sample: int) -> int:
    return int(world.frame.lengths[sample]) - 1


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
        records, world.truth, world.frame, tolerances, place=(0, None), planned=world.planned(plan)
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


def test_one_ulp_in_the_bitwise_tier(world: Any, plan: BatchPlan, faults: Any) -> None:
    records = world.records(plan, dtype="float32")

    def change(tensors: dict[str, Any]) -> None:
        tensors["model.norm.weight"].view(np.uint32)[1] += 1

    moved = changed(records, "gradient", None, change)
    (verdict,) = [v for v in judge_bitwise(moved, records, world.frame, place=(0, None)) if not v.ok]
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
    (verdict,) = [v for v in judge_bitwise(moved, records, world.frame, place=(0, None)) if not v.ok]
    assert (verdict.quantity, verdict.over) == ("entropy", 1)
    assert verdict.worst is not None
    assert verdict.worst.where.startswith(f"sample 000/0, position {position}, token ")


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


@pytest.mark.parametrize("stage", ["batch_inputs", "activations", "forward_data", "is_loss_debug", "loss"])
def test_a_record_missing(world: Any, plan: BatchPlan, faults: Any, stage: str) -> None:
    records = [r for r in world.records(plan) if (r.type, r.micro) != (stage, 1)]
    (gone,) = [r for r in world.records(plan) if (r.type, r.micro) == (stage, 1)]
    found = faults(records, plan)
    first, *rest = found
    assert (first.status, first.quantity, first.name) == (Status.COVERAGE, "coverage", stage)
    assert "was produced by no microbatch" in first.detail
    assert first.over == needed(world, stage, 2, 3)
    assert {v.status for v in rest} == {Status.MISSING}
    assert {v.place for v in rest} == {Place(0, None, 0, 1)}
    assert len(rest) == len(gone.tensors)
    assert {v.detail for v in rest} == {f"{stage} of rank 0 microbatch 1 was not recorded"}


@pytest.mark.parametrize("stage", ["gradient", "param", "optimizer"])
def test_a_record_of_the_update_missing(world: Any, plan: BatchPlan, faults: Any, stage: str) -> None:
    found = faults([r for r in world.records(plan) if r.type != stage], plan)
    names = [*world.truth[stage], *(["grad_norm"] if stage == "gradient" else [])]
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
    found = judge_update(records, truth, world.frame, tolerances, place=(0, None), planned=planned)
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


@pytest.mark.parametrize("stage", ["forward_data", "gradient"])
def test_a_record_duplicated(world: Any, plan: BatchPlan, faults: Any, stage: str) -> None:
    records = world.records(plan)
    twice = [*records, *[r for r in records if r.type == stage and r.micro in (None, 0)]]
    (verdict,) = faults(twice, plan)
    assert (verdict.status, verdict.quantity) == (Status.COVERAGE, "coverage")
    assert verdict.place == Place(0)
    micro = " microbatch 0" if stage == "forward_data" else ""
    assert (
        verdict.detail == f"{stage} of rank 0{micro} was recorded 2 times; only the first record was compared"
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
        stage: 0 if needed(world, stage, 2) == 6 else 6 - needed(world, stage, 2)
        for stage in (v.name for v in found)
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
    found = judge_update(records, world.truth, world.frame, tolerances, place=(0, None), planned=planned)
    (verdict,) = [v for v in found if v.status is Status.COVERAGE and v.name == "loss"]
    assert verdict.over == needed(world, "loss", 2, 3) + world.frame.lengths[4]
    records.append(next(r for r in world.records(plan, ranks=2) if r.type == "loss" and r.rank == 1))
    found = judge_update(
        [r for r in records if r.rank == 0 or r.type == "loss"],
        world.truth,
        world.frame,
        tolerances,
        place=(0, None),
        planned=planned,
    )
    assert any("recorded 2 times" in v.detail for v in found)


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


def test_dtype_widened(world: Any, plan: BatchPlan, faults: Any) -> None:
    records = world.records(plan, dtype="float32")
    only = {"gradient", "param"}
    quantities = {r.type for r in records} & only
    assert quantities == only

    def change(tensors: dict[str, Any]) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float64)

    widened = changed(records, "gradient", None, change)
    found = [v for v in faults(widened, plan, dtype="float32") if v.quantity == "gradient"]
    (verdict,) = [v for v in found if v.status is Status.DTYPE]
    assert (verdict.name, verdict.detail) == ("model.norm.weight", "golden float32, actual float64")


@pytest.mark.parametrize(
    ("stage", "micro", "name", "quantity"),
    [
        ("forward_data", 1, "entropy", "entropy"),
        ("is_loss_debug", 0, "log_probs", "log_probs"),
        ("activations", 2, "lm_head", "activations"),
        ("loss", 0, "kl_loss", "loss"),
        ("optimizer", None, "model.norm.weight/step", "optimizer"),
    ],
)
def test_a_dropped_key(
    world: Any, plan: BatchPlan, faults: Any, stage: str, micro: int | None, name: str, quantity: str
) -> None:
    found = faults(changed(world.records(plan), stage, micro, lambda t: t.pop(name)), plan)
    (verdict,) = found
    assert (verdict.status, verdict.quantity, verdict.place.micro) == (Status.MISSING, quantity, micro)
    assert verdict.name.endswith(name)


def test_an_additional_key(world: Any, plan: BatchPlan, faults: Any) -> None:
    records = changed(world.records(plan), "gradient", None, lambda t: t.update({"new.weight": np.ones(2)}))
    (verdict,) = faults(records, plan)
    assert (verdict.status, verdict.name) == (Status.EXTRA, "new.weight")
    records = changed(world.records(plan), "loss", 1, lambda t: t.update({"z_loss": np.ones(())}))
    (verdict,) = faults(records, plan)
    assert (verdict.status, verdict.quantity) == (Status.EXTRA, "coverage")
    assert verdict.detail == "loss of rank 0 microbatch 1 holds a tensor 'z_loss' that belongs to no quantity"


def test_a_loss_halved(world: Any, plan: BatchPlan, faults: Any) -> None:
    records = changed(world.records(plan), "loss", 1, lambda t: t.update(loss=t["loss"] / 2))
    (verdict,) = faults(records, plan)
    assert (verdict.status, verdict.quantity, verdict.name) == (Status.DRIFT, "loss", "loss")
    assert verdict.place == Place(0, None, 0, 1)
    assert verdict.worst.actual == verdict.worst.golden / 2
    tokens = int(world.loss_mask[world.frame.offsets[2] : world.frame.offsets[4]].sum())
    assert verdict.worst.where == f"loss of {tokens} loss tokens of 2 samples"


def test_a_wrong_gradient_norm(world: Any, plan: BatchPlan, faults: Any) -> None:
    records = [
        Record(r.type, 0, r.tensors, {"grad_norm": 3.0}, rank=0) if r.type == "gradient" else r
        for r in world.records(plan)
    ]
    (verdict,) = faults(records, plan)
    assert (verdict.status, verdict.quantity, verdict.relative) == (Status.DRIFT, "grad_norm", 1.0)


def test_wrong_shapes(world: Any, plan: BatchPlan, faults: Any) -> None:
    records = changed(
        world.records(plan), "forward_data", 0, lambda t: t.update(entropy=t["entropy"][:, :-1])
    )
    records = changed(records, "activations", 0, lambda t: t.update(lm_head=t["lm_head"][:, :-1]))
    assert [(v.status, v.name) for v in faults(records, plan)] == [
        (Status.SHAPE, "lm_head"),
        (Status.SHAPE, "entropy"),
    ]


def test_one_logit_off(world: Any, plan: BatchPlan, faults: Any) -> None:
    records = changed(
        world.records(plan), "activations", 1, lambda t: t["lm_head"].__setitem__((0, -1, 3), 9.0)
    )
    (verdict,) = faults(records, plan)
    last = last_loss_token(world, 3)
    token = int(world.truth["batch_inputs"]["input_ids"][world.frame.offsets[3] + last])
    assert verdict.worst.where == (
        f"sample 001/1, position {last}, token {token} '<{token}>', vocabulary entry 3 '<3>'"
    )


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


def test_a_quantity_without_tolerance_is_left_out(world: Any, plan: BatchPlan, tolerances: Any) -> None:
    records = changed(world.records(plan), "forward_data", 0, lambda t: t.pop("entropy"))
    verdicts = judge_update(
        records,
        world.truth,
        world.frame,
        lambda quantity: None if quantity == "entropy" else tolerances(quantity),
        place=(0, None),
        planned=world.planned(plan),
    )
    assert all(v.ok and v.quantity != "entropy" for v in verdicts)


def test_nothing_compared_is_a_fault(make_world: Any, tolerances: Any) -> None:
    """Without a single loss token no log-prob could be wrong."""
    world, plan = make_world([1, 1]), BatchPlan()
    verdicts = judge_update(
        world.records(plan),
        world.truth,
        world.frame,
        tolerances,
        place=(0, None),
        planned=world.planned(plan),
    )
    found = {v.name: v.detail for v in verdicts if not v.ok}
    assert found["log_probs"] == "not one element of log_probs was compared, so it could not fail"
    assert {v.quantity for v in verdicts if not v.ok} == {"coverage"}


def test_the_first_verdict_is_the_first_in_the_dataflow(world: Any, plan: BatchPlan, faults: Any) -> None:
    records = changed(
        world.records(plan), "gradient", None, lambda t: t.update({"model.norm.weight": np.ones(3)})
    )
    records = changed(records, "loss", 0, lambda t: t.update(loss=t["loss"] * 2))
    records = changed(records, "forward_data", 2, lambda t: t.update(log_probs=t["log_probs"] * 2))
    records = changed(records, "activations", 2, lambda t: t.update(lm_head=t["lm_head"] * 2))
    found = faults(list(reversed(records)), plan)
    assert [v.quantity for v in found] == ["activations", "log_probs", "loss", "gradient"]


def test_a_twin_of_another_layout_has_no_bytes_to_compare(world: Any) -> None:
    found = judge_bitwise(
        world.records(PADDED), world.records(BatchPlan(micro_batch_size=2, padding_side="left")), world.frame,
        place=(0, None),
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
    lost = [v for v in judge_bitwise(fewer, records, world.frame, place=(0, None)) if not v.ok]
    assert {(v.status, v.quantity) for v in lost} == {(Status.MISSING, "param")}
    more = [v for v in judge_bitwise(records, fewer, world.frame, place=(0, None)) if not v.ok]
    assert [(v.status, v.quantity, v.name) for v in more] == [(Status.EXTRA, "coverage", "param of rank 0")]


def test_a_twin_sees_padding(world: Any) -> None:
    layout = world.layouts(PADDED)[0]
    row, col = np.argwhere(~layout.attention_mask)[0]

    def change(tensors: dict[str, Any]) -> None:
        tensors["entropy"][row, col] = 1e-300

    records = world.records(PADDED)
    found = judge_bitwise(changed(records, "forward_data", 0, change), records, world.frame, place=(0, None))
    (verdict,) = [v for v in found if not v.ok]
    assert verdict.worst is not None
    assert verdict.worst.where == f"row {row}, column {col} (padding)"


def test_an_unchanged_update_has_no_fault(world: Any, plan: BatchPlan, faults: Any) -> None:
    assert faults(world.records(plan), plan) == []
