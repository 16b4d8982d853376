"""Replicas that differ: each is found, on the rank where it is, and named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from regress.compare.update_judge import judge_bitwise
from regress.compare.verdicts.verdict import Status, Verdict
from regress.dump.coordinates import Place
from regress.layout import BatchPlan
from tests.unit.compare.ranks.findings import LENGTHS, brief, refusal

UPDATE = Place(0)


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


def test_a_twin_on_a_mesh(make_ranks: Any) -> None:
    ranks = make_ranks(LENGTHS, dp=2, tp=2)
    bitwise_reference = make_ranks(LENGTHS, dp=2, tp=2)

    def faults() -> list[Verdict]:
        found = judge_bitwise(
            ranks.records, bitwise_reference.records, ranks.world.frame, place=Place(0), planned=ranks.plan
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
    ranks.record("param", 1).meta["shards"] = bitwise_reference.record("param", 0).meta["shards"]
    assert {v.detail for v in faults() if v.quantity == "param"} == {
        "param of rank 1 holds other shards than its bitwise reference, so bytes cannot be compared"
    }
