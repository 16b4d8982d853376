"""Tensors that are lost, added, misshapen, of another dtype or wrong: each is named in the order of the dataflow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from regress.compare.dumps.comparison import compare_dumps
from regress.compare.quantities import NEW
from regress.compare.update_judge import judge_update
from regress.compare.verdicts.verdict import Status, Verdict
from regress.dump.coordinates import Coordinates, Place
from regress.dump.record import Record
from regress.layout import BatchPlan
from tests.unit.compare.updates.edits import changed, last_loss_token
from tests.unit.compare.updates.pairs import Write


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
    ("record_type", "micro", "name", "quantity"),
    [
        ("forward_data", 1, "entropy", "entropy"),
        ("is_loss_debug", 0, "log_probs", "log_probs"),
        ("activations", 2, "lm_head", "activations"),
        ("loss", 0, "kl_loss", "loss"),
        ("optimizer", None, "model.norm.weight/step", "optimizer"),
    ],
)
def test_a_dropped_key(
    world: Any, plan: BatchPlan, faults: Any, record_type: str, micro: int | None, name: str, quantity: str
) -> None:
    found = faults(changed(world.records(plan), record_type, micro, lambda t: t.pop(name)), plan)
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


def metrics(**values: float) -> Record:
    return Record.of("metrics", Coordinates(0, rank=0), {f"training_step/{n}": v for n, v in values.items()})


def test_a_metric_that_no_golden_knows_yet_is_a_note(
    world: Any, plan: BatchPlan, tolerances: Any, write: Write
) -> None:
    """Whoever reports more computes nothing else; a metric that is lost is a failure."""
    truth = {**world.truth, "metrics": {"training_step/kl": np.array(0.5)}}

    def judged(**values: float) -> dict[str, Verdict]:
        records = [*world.records(plan), metrics(**values)]
        found = judge_update(
            records, truth, world.frame, tolerances, place=Place(0), planned=world.planned(plan)
        )
        return {v.name: v for v in found if v.quantity == "metrics"}

    added = judged(kl=0.5, kept=0.25)
    assert all(verdict.ok for verdict in added.values())
    assert added["training_step/kept"].detail == NEW
    assert judged(kept=0.25)["training_step/kl"].status is Status.MISSING
    golden, actual = (
        write(n, [metrics(**v)]) for n, v in (("g", {"kl": 0.5}), ("a", {"kl": 0.5, "kept": 1}))
    )
    assert compare_dumps(golden, actual).failed == []
    assert f"metrics/training_step/kept: {NEW}" in compare_dumps(golden, actual).notes
    assert [v.status for v in compare_dumps(actual, golden).failed] == [Status.MISSING]


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


def test_a_quantity_without_tolerance_is_left_out(world: Any, plan: BatchPlan, tolerances: Any) -> None:
    records = changed(world.records(plan), "forward_data", 0, lambda t: t.pop("entropy"))
    verdicts = judge_update(
        records,
        world.truth,
        world.frame,
        lambda quantity: None if quantity == "entropy" else tolerances(quantity),
        place=Place(0),
        planned=world.planned(plan),
    )
    assert all(v.ok and v.quantity != "entropy" for v in verdicts)


def test_the_first_verdict_is_the_first_in_the_dataflow(world: Any, plan: BatchPlan, faults: Any) -> None:
    records = changed(
        world.records(plan), "gradient", None, lambda t: t.update({"model.norm.weight": np.ones(3)})
    )
    records = changed(records, "loss", 0, lambda t: t.update(loss=t["loss"] * 2))
    records = changed(records, "forward_data", 2, lambda t: t.update(log_probs=t["log_probs"] * 2))
    records = changed(records, "activations", 2, lambda t: t.update(lm_head=t["lm_head"] * 2))
    found = faults(list(reversed(records)), plan)
    assert [v.quantity for v in found] == ["activations", "log_probs", "loss", "gradient"]


def test_an_unchanged_update_has_no_fault(world: Any, plan: BatchPlan, faults: Any) -> None:
    assert faults(world.records(plan), plan) == []
