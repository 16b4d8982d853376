"""Shards that are wrong, lie elsewhere or do not fit: each is found, on the rank where it is, and named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from regress.layout import ShardLayout
from tests.unit.compare.ranks.findings import LENGTHS, brief, refusal


def test_overlapping_shards_that_disagree(make_ranks: Any) -> None:
    """Rank 1 holds one row of rank 0, too, and another value there."""
    ranks = make_ranks(LENGTHS, fsdp=2)
    name = "embed.weight"
    record = ranks.record("param", 1)
    wider = ShardLayout((7, 3), (((3, 7),), ((0, 3),)))
    record.meta["shards"][name] = wider.to_json()
    record.tensors[name] = wider.project(ranks.world.truth["param"][name]).copy()
    assert ranks.faults() == [], "an overlap alone is not a fault"
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
