"""Records that cannot be brought into canonical form are refused with a sentence that names them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from regress.compare.alignment.canonical_projection import Projection
from regress.compare.alignment.canonical_tensors import canonicalize
from regress.compare.alignment.record_keys import canonical_layout
from regress.compare.alignment.token_places import Places
from regress.compare.quantities import QUANTITIES, primary_source, quantity_named, source_of
from regress.dump.record import Record
from regress.dump.record_types import RECORD_TYPES
from regress.errors import CompareError
from regress.layout import BatchPlan, TokenFrame

PLAN = BatchPlan(micro_batch_size=2)


@pytest.fixture
def world(make_world: Callable[..., Any]) -> Any:
    return make_world((5, 2, 6, 3, 4), seed=1)


def with_tensors(
    records: list[Record], record_type: str, micro: int | None, change: Callable[[dict[str, Any]], Any]
) -> None:
    for record in records:
        if (record.type, record.micro) == (record_type, micro):
            change(record.tensors)


def refused(records: list[Record], frame: TokenFrame) -> str:
    with pytest.raises(CompareError) as caught:
        canonicalize(records, frame)
    return str(caught.value)


def test_a_missing_microbatch(world: Any) -> None:
    records = [r for r in world.records(PLAN) if (r.type, r.micro) != ("forward_data", 1)]
    first, *rest = np.flatnonzero(world.loss_mask[7:16])
    assert first < 6, "a token of the first sample of the microbatch"
    assert refused(records, world.frame).startswith(
        f"forward_data cannot be brought into canonical form: sample 001/0, position {first} was produced by no "
        f"microbatch (as were {len(rest)} other tokens)"
    )


def test_a_missing_microbatch_of_inputs(world: Any) -> None:
    records = [r for r in world.records(PLAN) if (r.type, r.micro) != ("batch_inputs", 1)]
    assert refused(records, world.frame).startswith(
        "batch_inputs cannot be brought into canonical form: sample 001/0, position 0 was produced by no microbatch "
        "(as were 8 other tokens)"
    )


def test_a_microbatch_twice(world: Any) -> None:
    records = world.records(PLAN)
    records += [Record(r.type, 0, r.tensors, r.meta, rank=0, micro=3) for r in records if r.micro == 0]
    assert "sample 000/0, position 0 was produced twice: microbatches 0 and 3" in refused(
        records, world.frame
    )


def test_a_record_twice(world: Any) -> None:
    records = world.records(PLAN)
    message = refused([*records, records[0]], world.frame)
    assert message == (
        "batch_inputs of rank 0 microbatch 0 was recorded 2 times, so it has no one value; keep one record"
    )


def test_ranks_that_disagree(world: Any) -> None:
    records = world.records(PLAN, ranks=2)
    for record in records:
        if (record.type, record.rank) == ("param", 1):
            record.tensors["model.norm.weight"] = record.tensors["model.norm.weight"] + 1
    assert refused(records, world.frame) == (
        "model.norm.weight in param of rank 1 differs from that of another rank, so it has no one value"
    )


def test_a_tensor_of_some_microbatches(world: Any) -> None:
    records = world.records(PLAN)
    with_tensors(records, "forward_data", 1, lambda t: t.pop("entropy"))
    assert refused(records, world.frame) == (
        "forward_data of rank 0 microbatch 1 lacks entropy, which other microbatches have"
    )


def test_an_unknown_tensor(world: Any) -> None:
    records = world.records(PLAN)
    for micro in range(3):
        with_tensors(records, "loss", micro, lambda t: t.update(z_loss=np.ones(())))
    assert refused(records, world.frame) == (
        "loss holds a tensor 'z_loss' that belongs to no quantity; leave it out of the tap"
    )


def test_several_dtypes(world: Any) -> None:
    records = world.records(PLAN)
    with_tensors(records, "forward_data", 1, lambda t: t.update(entropy=t["entropy"].astype(np.float32)))
    assert "entropy has several dtypes over its microbatches (float32, float64)" in refused(
        records, world.frame
    )


@pytest.mark.parametrize(("record_type", "name"), [("forward_data", "entropy"), ("activations", "lm_head")])
def test_a_shape_that_is_not_of_its_tokens(world: Any, record_type: str, name: str) -> None:
    records = world.records(PLAN)
    with_tensors(records, record_type, 0, lambda t: t.update({name: t[name][:, :-1]}))
    assert "which is neither that of its tokens [2, 5] nor one row for each loss token" in refused(
        records, world.frame
    )


def test_hidden_states_of_several_sizes(world: Any) -> None:
    records = world.records(PLAN)
    with_tensors(
        records, "activations", 0, lambda t: t.update({"model.layers.0": t["model.layers.0"][..., :1]})
    )
    assert "model.layers.0 has several sizes over its microbatches" in refused(records, world.frame)


def test_loss_tokens_that_nobody_tells(world: Any) -> None:
    records = [r for r in world.records(PLAN) if r.type == "activations"]
    assert "activations of rank 0 microbatch 0 does not tell its loss tokens" in refused(records, world.frame)


def test_the_mask_of_any_stage_tells_the_loss_tokens(world: Any) -> None:
    for record_type in ("batch_inputs", "forward_data", "is_loss_debug"):
        records = [r for r in world.records(PLAN) if r.type in ("activations", record_type)]
        found = canonicalize(records, world.frame)
        np.testing.assert_array_equal(found["activations"]["lm_head"], world.truth["activations"]["lm_head"])
        np.testing.assert_array_equal(
            found["batch_inputs"]["response_mask"], world.truth["batch_inputs"]["response_mask"]
        )


def test_a_microbatch_without_number_is_the_first(world: Any) -> None:
    records = [
        Record(r.type, 0, r.tensors, r.meta, rank=None, micro=None) for r in world.records(BatchPlan())
    ]
    assert canonicalize(records, world.frame).keys() == world.truth.keys()


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({}, "has no usable token layout (KeyError: 'layout')"),
        ({"layout": {"shape": [1], "segments": []}}, "but nothing tells whose tokens these are"),
        ({"layout": {"shape": [1], "segments": []}, "samples": []}, "has no usable token layout (ValueError"),
        ({"layout": {"shape": [1, 4], "segments": [[0, 0, 2, 0, 0]]}, "samples": 3}, "(TypeError"),
        (
            {"layout": {"shape": [1, 4], "segments": [[0, 0, 2, 0, 0]]}, "samples": []},
            "1 segments but 0 samples",
        ),
        (
            {"layout": {"shape": [1, 4], "segments": [[0, 0, 2, 0, 0]]}, "samples": [["x", 0]]},
            "holds sample x/0, which does not belong to this update",
        ),
        (
            {"layout": {"shape": [1, 9], "segments": [[0, 0, 9, 0, 0]]}, "samples": [["a", 0]]},
            "holds 9 tokens of sample a/0, which has 3",
        ),
    ],
)
def test_layouts_that_do_not_fit(meta: dict[str, Any], message: str) -> None:
    with pytest.raises(CompareError, match=r"^forward_data of rank 0 microbatch 1 ") as caught:
        canonical_layout(Record("forward_data", 0, {}, meta, rank=0, micro=1), TokenFrame((("a", 0),), (3,)))
    assert message in str(caught.value)


def test_golden_values_of_other_samples_are_refused(world: Any) -> None:
    layout = world.layouts(PLAN)[0]
    places = Places.of(layout, layout, world.frame.offsets)
    golden = Projection({"log_probs": {"log_probs": np.zeros(3)}}, world.frame)
    (source,) = golden.record_type("forward_data")
    with pytest.raises(
        CompareError, match=r"log_probs has the shape \[3\], but the samples of this update have 20"
    ):
        golden.part(source)
    del world.truth["policy_loss"]
    golden = Projection(world.truth, world.frame)
    (source,) = [s for s in golden.record_type("loss") if s.name == "pg_loss"]
    with pytest.raises(CompareError, match="lack policy_loss, but pg_loss is the sum of its terms"):
        golden.share(source.name, places.order)
    golden = Projection({"entropy": {"entropy": np.zeros(20)}}, world.frame)
    with pytest.raises(CompareError, match="lack batch_inputs/response_mask, but without it nothing tells"):
        golden.part(golden.record_type("forward_data")[0])


def test_the_table_of_quantities_covers_all_stages() -> None:
    assert len({q.name for q in QUANTITIES}) == len(QUANTITIES)
    assert {q.level for q in QUANTITIES} == {"step", "update", "micro"}
    assert {record_type.name for record_type in RECORD_TYPES if source_of(record_type.name, "x")} == {
        *("activations", "gradient", "gradient_clipped", "param", "optimizer", "metrics", "step_metrics")
    }
    for record_type, tensor, quantity in (
        ("forward_data", "log_probs", "log_probs"),
        ("is_loss_debug", "log_probs", "log_probs"),
        ("loss", "entropy_loss", "loss"),
        ("is_loss_debug", "entropy_loss", "entropy_loss"),
    ):
        found = source_of(record_type, tensor)
        assert found is not None
        assert found.quantity == quantity
    assert primary_source("batch_inputs", "response_mask").record_type == "batch_inputs"
    with pytest.raises(
        CompareError, match="'logprobs' is not a quantity; choose one of trajectory, sampler_log_probs"
    ):
        quantity_named("logprobs")
