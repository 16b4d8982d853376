"""Faults among ranks: each is found, on the rank where it is, and named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from regress.compare.alignment.canonical import canonicalize
from regress.compare.updates.bitwise_reference import judge_bitwise
from regress.compare.verdicts.verdict import Place, Status, Verdict
from regress.dump.record import Record
from regress.errors import CompareError
from regress.layout import BatchPlan, ShardLayout

LENGTHS = (5, 2, 6, 3, 4, 3)
UPDATE = Place(0)


def brief(verdicts: Sequence[Verdict]) -> list[tuple[str, str, str, str]]:
    return [(str(v.status), v.quantity, v.name, str(v.place)) for v in verdicts]


def refusal(ranks: Any) -> str:
    with pytest.raises(CompareError) as caught:
        canonicalize(ranks.records, ranks.world.frame, ranks.plan)
    return str(caught.value)


def test_a_token_produced_by_two_data_ranks(make_ranks: Any) -> None:
    ranks = make_ranks(LENGTHS, BatchPlan(micro_batch_size=1), dp=2)
    for i, record in enumerate(ranks.records):
        if (record.rank, record.micro) == (1, 2):
            ranks.records[i] = replace(ranks.record(record.type, 0, 2), rank=1)
    found = ranks.faults()
    assert {v.quantity for v in found} == {"coverage"}
    for verdict in found:
        assert verdict.detail.startswith("sample 002/1, position ")
        assert "was produced by no microbatch" in verdict.detail
    ranks = make_ranks(LENGTHS, BatchPlan(micro_batch_size=1), dp=2)
    last = ranks.record("loss", 1, 2)
    again: Any = ranks.record("loss", 0, 2)
    layout = {"shape": [1, 12], "segments": [*_moved(last, 0), *_moved(again, 6)]}
    meta = {**last.meta, "layout": layout, "samples": [["002", 1], ["001", 0]]}
    ranks.records = [r if r is not last else replace(r, meta=meta) for r in ranks.records]
    (verdict,) = [v for v in ranks.faults() if v.quantity == "coverage"]
    assert brief([verdict]) == [("coverage", "coverage", "loss", "step0")]
    assert verdict.detail.startswith("sample 001/0, position 0, token ")
    assert verdict.detail.endswith(
        "was produced twice: rank 0 microbatch 2 and rank 1 microbatch 2 (as were 5 other tokens)"
    )


def _moved(record: Record, col: int) -> list[list[int]]:
    """The one segment of a record at another column, as a sample of its own."""
    layout: Any = record.meta["layout"]
    ((_, start, stop, _, _),) = layout["segments"]
    return [[col, start, stop, 0, col]]


@pytest.mark.parametrize("split", ["contiguous", "zigzag"])
def test_a_token_lost_at_a_boundary_of_a_split_sequence(make_ranks: Any, split: str) -> None:
    """The value of the first token of a block is computed from the last token of the block before: off by one."""
    ranks = make_ranks((8, 8), cp=2, sequence_split=split)
    assert ranks.faults() == []
    lost = 4 if split == "contiguous" else 6
    holder = 0 if split == "contiguous" else 1
    ranks.world.loss_mask[:] = True
    ranks.world.loss_mask[[0, 8]] = False
    ranks.world.truth["batch_inputs"]["response_mask"][:] = ranks.world.loss_mask
    ranks = _again(make_ranks, ranks, (8, 8), cp=2, sequence_split=split)
    assert ranks.faults() == []
    for stage in ("forward_data", "is_loss_debug", "loss"):
        record = ranks.record(stage, holder, 0)
        layout: Any = record.meta["layout"]
        keep = [[s, a, b - 1 if b - 1 == lost else b, r, c] for s, a, b, r, c in layout["segments"]]
        record.meta["layout"] = {**layout, "segments": keep}
    found = [v for v in ranks.faults() if v.quantity == "coverage"]
    assert brief(found) == [
        ("coverage", "coverage", s, "step0") for s in ("forward_data", "is_loss_debug", "loss")
    ]
    for verdict in found:
        assert verdict.detail.startswith(f"sample 000/0, position {lost}, token ")
        assert verdict.detail.endswith("was produced by no microbatch (as was 1 other token)")
        assert (verdict.over, verdict.count) == (2, 14), "of the loss tokens: none for the first of a sample"


def _again(make_ranks: Any, old: Any, lengths: Sequence[int], **given: Any) -> Any:
    """The records once more, of golden values that were changed."""
    new = make_ranks(lengths, **given)
    new.world.truth.update(old.world.truth)
    new.world.loss_mask[:] = old.world.loss_mask
    rng = np.random.default_rng(0)
    loss = new.world.loss_mask
    for quantity, name in (("activations", "lm_head"), ("logit_gradient", "logit_gradient")):
        new.world.truth[quantity][name] = rng.standard_normal((int(loss.sum()), 5))
    for quantity, tensors in new.world.truth.items():
        for name, values in tensors.items():
            if quantity not in ("batch_inputs", "activations") and values.shape == loss.shape:
                tensors[name] = np.where(loss, rng.standard_normal(loss.shape), 0.0)
    new.__post_init__()
    return new


def test_a_tensor_parallel_replica_that_differs_in_one_bit(make_ranks: Any) -> None:
    ranks = make_ranks(LENGTHS, BatchPlan(micro_batch_size=3), dp=2, tp=2)
    layout = ranks.layouts[3][0].targets
    canonical, local = layout.indices(ranks.world.frame.offsets)
    at = int(local[np.flatnonzero(ranks.world.loss_mask[canonical])[0]])
    array = ranks.edit("forward_data", 3, 0, "log_probs")
    before = float(array.reshape(-1)[at])
    array.view(np.uint64).reshape(-1)[at] ^= np.uint64(1)
    (verdict,) = ranks.faults()
    assert brief([verdict]) == [("drift", "replicas", "forward_data/log_probs", "step0")]
    token = int(canonical[np.flatnonzero(local == at)[0]])
    (group, run), position = ranks.world.frame.locate(token)
    where = f"sample {group}/{run}, position {position}, token {ranks.world.truth['batch_inputs']['input_ids'][token]}"
    assert verdict.worst.where == where
    assert verdict.worst.ulp == 1.0
    assert verdict.detail == (
        f"log_probs in forward_data of rank 3 microbatch 0 differs from that of rank 2 in 1 of {layout.num_tokens} "
        f"elements, most at {where}: {float(array.reshape(-1)[at])!r} and {before!r}"
    )
    assert "log_probs in forward_data of rank 3 microbatch 0 differs from that of another rank" in refusal(
        ranks
    )


def test_what_ranks_compute_of_padding_is_nobodys(make_ranks: Any) -> None:
    ranks = make_ranks(LENGTHS, tp=2)
    layout = ranks.layouts[1][0].targets
    row, col = np.argwhere(~layout.attention_mask)[0]
    ranks.edit("forward_data", 1, 0, "log_probs")[row, col] = 3.0
    assert ranks.faults() == []


def test_overlapping_shards_that_disagree(make_ranks: Any) -> None:
    """Rank 1 holds one row of rank 0, too, and another value there."""
    ranks = make_ranks(LENGTHS, fsdp=2)
    name = "embed.weight"
    record = ranks.record("param", 1)
    wider = ShardLayout((7, 3), (((3, 7),), ((0, 3),)))
    record.meta["shards"][name] = wider.to_json()
    record.tensors[name] = wider.project(ranks.world.truth["param"][name]).copy()
    assert ranks.faults() == [], "an overlap alone is no fault"
    record.tensors[name][0, 2] += 1.0
    drift, verdict = ranks.faults()
    assert brief([drift]) == [("drift", "param", name, "step0/rank1")]
    assert (drift.worst.index, drift.worst.where) == ((0, 2), f"element [3, 2] of {name}")
    assert brief([verdict]) == [("drift", "replicas", f"param/{name}", "step0")]
    golden = float(ranks.world.truth["param"][name][3, 2])
    assert verdict.detail == (
        f"{name} of rank 1 differs from that of rank 0 in 1 of 3 elements, most at element [3, 2] of {name}: "
        f"{golden + 1.0!r} and {golden!r}"
    )
    assert refusal(ranks) == (
        f"{name} in param of rank 1 differs from that of another rank, so it has no one value"
    )


def test_shards_at_wrong_offsets(make_ranks: Any) -> None:
    """Two ranks of equal shards, each with the other's."""
    ranks = make_ranks(LENGTHS, tp=2)
    name = "layers.0.qkv.weight"
    first, second = (ranks.record("gradient", rank).tensors for rank in (0, 1))
    first[name], second[name] = second[name], first[name]
    found = ranks.faults()
    assert brief(found) == [("drift", "gradient", name, f"step0/rank{rank}") for rank in (0, 1)]
    assert all(v.over == v.count == 12 for v in found)
    rows = [int(v.worst.where.split("[")[1].split(",")[0]) for v in found]
    assert rows[0] in (0, 1, 4, 6)
    assert rows[1] in (2, 3, 5, 7)


def test_rows_of_an_expert_that_nobody_holds(make_ranks: Any) -> None:
    """An expert parallel rank that starts one expert too late."""
    ranks = make_ranks(LENGTHS, ep=3)
    name = "layers.0.experts.weight"
    record = ranks.record("param", 1)
    late = ShardLayout((3, 2, 2), (((2, 3),), ((0, 2),), ((0, 2),)))
    record.meta["shards"][name] = late.to_json()
    record.tensors[name] = late.project(ranks.world.truth["param"][name])
    (verdict,) = ranks.faults()
    assert brief([verdict]) == [("coverage", "coverage", f"param/{name}", "step0")]
    assert verdict.detail == f"element [1, 0, 0] of {name} is held by no rank (and 3 other elements)"
    assert (verdict.over, verdict.count) == (4, 12)
    assert refusal(ranks) == (
        f"element [1, 0, 0] of {name} in param of rank 0 is held by no rank (and 3 other elements)"
    )


def test_a_module_that_no_stage_records(make_ranks: Any) -> None:
    ranks = make_ranks(LENGTHS, pp=2)
    for record in ranks.records:
        if record.type == "activations":
            record.tensors.pop("model.layers.0", None)
    (verdict,) = ranks.faults()
    assert brief([verdict]) == [("missing", "coverage", "activations/model.layers.0", "step0")]
    assert verdict.detail == "no rank holds model.layers.0"


def test_a_parameter_that_no_stage_records(make_ranks: Any) -> None:
    ranks = make_ranks(LENGTHS, pp=2, dp=2)
    for record in ranks.records:
        if record.type == "gradient":
            record.tensors.pop("norm.weight", None)
    (verdict,) = ranks.faults()
    assert brief([verdict]) == [("missing", "coverage", "gradient/norm.weight", "step0")]
    assert verdict.detail == "no rank holds norm.weight"


def test_a_parameter_that_one_replica_of_a_stage_lacks(make_ranks: Any) -> None:
    ranks = make_ranks(LENGTHS, pp=2, dp=2)
    ranks.record("gradient", 3).tensors.pop("norm.weight")
    (verdict,) = ranks.faults()
    assert brief([verdict]) == [("missing", "gradient", "norm.weight", "step0/rank3")]
    ranks = make_ranks(LENGTHS, pp=2, dp=2)
    ranks.record("activations", 1, 0).tensors.pop("model.layers.0")
    (verdict,) = ranks.faults()
    assert brief([verdict]) == [("missing", "activations", "model.layers.0", "step0/rank1/micro0")]


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}, {"fsdp": 2}, {"cp": 2}])
def test_a_rank_missing_altogether(make_ranks: Any, mesh: dict[str, int]) -> None:
    ranks = make_ranks(LENGTHS, **mesh)
    gone = {(r.type, r.micro) for r in ranks.records if r.rank == 1}
    ranks.records = [r for r in ranks.records if r.rank == 0]
    found = ranks.faults()
    lost = [v for v in found if v.quantity != "coverage"]
    assert {v.status for v in lost} == {Status.MISSING}
    assert {v.place for v in lost} == {Place(0, None, 1), Place(0, None, 1, 0)}
    assert {v.quantity for v in lost} == set(ranks.world.truth)
    words = {
        f"{stage} of rank 1{'' if micro is None else f' microbatch {micro}'} was not recorded"
        for stage, micro in gone
    }
    assert words <= {v.detail for v in lost}
    covered = {v.name for v in found if v.quantity == "coverage"}
    tokens = {"batch_inputs", "activations", "forward_data", "is_loss_debug", "loss"}
    sharded = {f"param/{n}" for n in ("embed.weight", "layers.0.qkv.weight", "norm.weight")}
    assert (tokens <= covered) == ("tp" not in mesh), "the tokens of a replica are not lost"
    assert (sharded <= covered) == ("fsdp" in mesh)


def test_the_only_rank_of_a_stage_missing(make_ranks: Any) -> None:
    ranks = make_ranks(LENGTHS, pp=2)
    ranks.records = [r for r in ranks.records if r.rank == 0]
    found = ranks.faults()
    names = {v.name for v in found if v.place.rank == 1 and v.quantity == "param"}
    assert names == {"norm.weight"}, "what nobody has; the embedding is on the first stage, too"
    assert {v.place.rank for v in found if v.quantity == "log_probs"} == {1}
    assert ("missing", "coverage", "param/norm.weight", "step0") in brief(found)


def test_a_rank_whose_tokens_are_not_those_that_it_repeats(make_ranks: Any) -> None:
    """Tensor parallel ranks that were dealt different samples."""
    ranks = make_ranks(LENGTHS, BatchPlan(micro_batch_size=3), tp=2)
    for i, record in enumerate(ranks.records):
        if record.rank == 1 and record.micro is not None:
            ranks.records[i] = replace(
                ranks.record(record.type, 0, 1 - record.micro), rank=1, micro=record.micro
            )
    found = ranks.faults()
    assert {(v.status, v.quantity, v.place) for v in found} == {(Status.COVERAGE, "replicas", UPDATE)}
    assert [v.name for v in found] == [
        s
        for s in ("batch_inputs", "activations", "forward_data", "is_loss_debug", "loss", "token_gradient")
        for _ in range(2)
    ]
    assert found[0].detail.startswith(
        "the tokens of batch_inputs of rank 1 microbatch 0 do not lie as those of rank 0, which it repeats: "
        "sample 000/0, position 0, token "
    )
    assert found[0].detail.endswith("is on rank 0 and not on rank 1")
    assert "do not lie as those of rank 0, which it repeats" in refusal(ranks)


def test_a_replicated_gradient_that_one_rank_did_not_reduce(make_ranks: Any) -> None:
    ranks = make_ranks(LENGTHS, dp=3)
    golden = ranks.world.truth["gradient"]["norm.weight"]
    ranks.edit("gradient", 0, None, "norm.weight")[:] = golden / 3
    drift, verdict = ranks.faults()
    assert brief([drift]) == [("drift", "gradient", "norm.weight", "step0/rank0")]
    assert brief([verdict]) == [("drift", "replicas", "gradient/norm.weight", "step0")]
    assert verdict.detail.startswith("norm.weight of rank 0 differs from that of rank 1 in 3 of 3 elements")


def test_replicas_that_all_differ_are_one_verdict(make_ranks: Any) -> None:
    ranks = make_ranks(LENGTHS, dp=3)
    for rank in (1, 2):
        ranks.edit("param", rank, None, "norm.weight")[0] += 1e-15 * rank
    (verdict,) = ranks.faults()
    assert verdict.detail.startswith("norm.weight of rank 1 differs from that of rank 0 in 1 of 3 elements")
    assert verdict.detail.endswith(" (and 1 more pair of ranks)")


def test_a_gradient_norm_that_counts_a_replicated_parameter_twice(make_ranks: Any) -> None:
    ranks = make_ranks(LENGTHS, tp=2)
    norm = float(np.hypot(1.5, 0.5))
    for rank in (0, 1):
        ranks.record("gradient", rank).meta["grad_norm"] = norm
    assert brief(ranks.faults()) == [
        ("drift", "grad_norm", "grad_norm", f"step0/rank{rank}") for rank in (0, 1)
    ]
    ranks.record("gradient", 0).meta["grad_norm"] = 1.5
    drift, verdict = ranks.faults()
    assert brief([drift]) == [("drift", "grad_norm", "grad_norm", "step0/rank1")]
    assert verdict.detail == (
        f"grad_norm of rank 1 differs from that of rank 0 in 1 of 1 elements, most at grad_norm: {norm!r} and 1.5"
    )
    assert refusal(ranks) == (
        "grad_norm in gradient of rank 1 differs from that of another rank, so it has no one value"
    )


def test_a_shard_in_the_wrong_dtype(make_ranks: Any) -> None:
    ranks = make_ranks(LENGTHS, fsdp=2, dp=2)
    name = "layers.0.o.weight"
    record = ranks.record("param", 3)
    record.tensors[name] = record.tensors[name].astype(np.float32)
    found = [v for v in ranks.faults(dtype="float64") if v.quantity in ("param", "replicas")]
    dtype, verdict = [v for v in found if v.name.endswith(name)]
    assert brief([dtype, verdict]) == [
        ("dtype", "param", name, "step0/rank3"),
        ("dtype", "replicas", f"param/{name}", "step0"),
    ]
    assert dtype.detail == "golden float64, actual float32"
    assert verdict.detail == f"{name} of rank 3 is float32, that of rank 1 float64"


def test_a_shard_of_a_tensor_of_another_shape(make_ranks: Any) -> None:
    ranks = make_ranks(LENGTHS, fsdp=2)
    record = ranks.record("param", 1)
    record.meta["shards"]["norm.weight"] = ShardLayout((4,), (((2, 3),),)).to_json()
    shape, covered = ranks.faults()
    assert brief([shape, covered]) == [
        ("coverage", "coverage", "param/norm.weight", "step0"),
        ("shape", "param", "norm.weight", "step0/rank1"),
    ]
    assert shape.detail == "element [2] of norm.weight is held by no rank"
    assert covered.detail == "golden [3], actual a part of [4]"


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        (
            {"shape": [3]},
            "norm.weight in param of rank 1 has no usable shard layout (KeyError: 'ranges'); write",
        ),
        (
            {"shape": [3], "ranges": [[[2, 5]]]},
            "no usable shard layout (ValueError: range 2:5 of dimension 0",
        ),
        (
            {"shape": [3], "ranges": [[[1, 3]]]},
            "norm.weight in param of rank 1 has the shape [1], but its shard layout is that of a part of the shape [2]",
        ),
    ],
)
def test_shards_that_do_not_fit_their_tensor(make_ranks: Any, shards: Any, message: str) -> None:
    ranks = make_ranks(LENGTHS, fsdp=2)
    ranks.record("param", 1).meta["shards"]["norm.weight"] = shards
    uncovered, verdict = ranks.faults()
    assert brief([uncovered, verdict]) == [
        ("coverage", "coverage", "param/norm.weight", "step0"),
        ("coverage", "param", "norm.weight", "step0/rank1"),
    ]
    assert message in verdict.detail
    assert message in refusal(ranks)


def test_columns_of_a_sequence_that_no_rank_holds(make_ranks: Any) -> None:
    ranks = make_ranks((4, 4), tp=2, sequence_parallel=True)
    for rank in (0, 1):
        record = ranks.record("activations", rank, 0)
        shards = ShardLayout.from_json(record.meta["shards"]["model.layers.0"])
        (start, stop) = shards.ranges[1][0]
        kept = (start, stop) if rank == 0 else (start + 1, stop)
        if rank == 1:
            record.tensors["model.layers.0"] = record.tensors["model.layers.0"][:, 1:]
        layout = ShardLayout(shards.shape, (shards.ranges[0], (kept,), shards.ranges[2]))
        record.meta["shards"]["model.layers.0"] = layout.to_json()
    (verdict,) = ranks.faults()
    assert brief([verdict]) == [("coverage", "coverage", "activations/model.layers.0", "step0")]
    assert verdict.detail.startswith("sample 000/0, position 2, token ")
    assert verdict.detail.endswith(
        ", element [0] of model.layers.0 is held by no rank (and 5 other elements)"
    )


def test_one_logit_of_a_vocabulary_shard(make_ranks: Any) -> None:
    ranks = make_ranks(LENGTHS, tp=2)
    ranks.edit("activations", 1, 0, "lm_head")[0, 0, 1] += 1.0
    (verdict,) = ranks.faults()
    assert brief([verdict]) == [("drift", "activations", "lm_head", "step0/rank1/micro0")]
    assert verdict.worst.index == (0, 0, 1)
    assert verdict.worst.where.endswith(", vocabulary entry 4"), "the fifth: the first rank has three"


def test_one_hidden_value_of_a_sequence_shard(make_ranks: Any) -> None:
    ranks = make_ranks((4, 4), tp=2, sequence_parallel=True)
    ranks.edit("activations", 1, 0, "model.layers.0")[1, 1, 2] += 1.0
    (verdict,) = ranks.faults()
    assert brief([verdict]) == [("drift", "activations", "model.layers.0", "step0/rank1/micro0")]
    assert verdict.worst.where.startswith("sample 000/1, position 3, token ")
    assert verdict.worst.where.endswith(", element [2]")


def test_values_of_the_loss_on_a_stage_that_has_none(make_ranks: Any) -> None:
    ranks = make_ranks(LENGTHS, pp=2)
    ranks.records.append(replace(ranks.record("loss", 1, 0), rank=0))
    (verdict,) = ranks.faults()
    assert brief([verdict]) == [("extra", "coverage", "loss of rank 0 microbatch 0", "step0")]
    assert verdict.detail == "loss of rank 0 microbatch 0 was recorded, but is not part of the plan"


def test_a_twin_on_a_mesh(make_ranks: Any) -> None:
    ranks = make_ranks(LENGTHS, dp=2, tp=2)
    twin = make_ranks(LENGTHS, dp=2, tp=2)

    def faults() -> list[Verdict]:
        found = judge_bitwise(
            ranks.records, twin.records, ranks.world.frame, place=(0, None), planned=ranks.plan
        )
        assert "replicas" in {v.quantity for v in found}
        return [v for v in found if not v.ok]

    assert faults() == []
    ranks.edit("param", 3, None, "norm.weight").view(np.uint64)[1] ^= np.uint64(1)
    assert brief(faults()) == [
        ("drift", "param", "norm.weight", "step0/rank3"),
        ("drift", "replicas", "param/norm.weight", "step0"),
    ]
    ranks = make_ranks(LENGTHS, dp=2, tp=2)
    ranks.record("param", 1).meta["shards"] = twin.record("param", 0).meta["shards"]
    assert {v.detail for v in faults() if v.quantity == "param"} == {
        "param of rank 1 holds other shards than its bitwise reference, so bytes cannot be compared"
    }
