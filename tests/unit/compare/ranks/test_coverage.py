"""Tokens, tensors and records that the ranks lose or have twice: each is found, on the rank where it is, and named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from regress.compare.verdicts.verdict import Status
from regress.dump.coordinates import Place
from regress.dump.record import Record
from regress.layout import BatchPlan
from tests.unit.compare.ranks.findings import LENGTHS, brief


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
    for record_type in ("forward_data", "is_loss_debug", "loss"):
        record = ranks.record(record_type, holder, 0)
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
        f"{record_type} of rank 1{'' if micro is None else f' microbatch {micro}'} was not recorded"
        for record_type, micro in gone
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


def test_values_of_the_loss_on_a_stage_that_has_none(make_ranks: Any) -> None:
    ranks = make_ranks(LENGTHS, pp=2)
    ranks.records.append(replace(ranks.record("loss", 1, 0), rank=0))
    (verdict,) = ranks.faults()
    assert brief([verdict]) == [("extra", "coverage", "loss of rank 0 microbatch 0", "step0")]
    assert verdict.detail == "loss of rank 0 microbatch 0 was recorded, but is not part of the plan"
