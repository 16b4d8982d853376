"""Test ids: which rank, microbatch and quantity of a variant has a test."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from regress.golden.golden_case import GoldenCase
from regress.replay.test_matrix import Item, Replay, items
from regress.replay.variant import Precision, Variant

LOSS = {"advantages", "log_probs", "entropy", "ratio", "token_loss", "loss"}
WHOLE = {"gradient", "grad_norm", "param", "optimizer", "metrics", "step_metrics"}


def enumerated(case: GoldenCase, name: str = "mine", **overrides: Any) -> list[Item]:
    variant = Variant(name, "a test", {key.replace("__", "."): value for key, value in overrides.items()})
    return list(items(Replay(case, variant, Precision.FLOAT64)))


def test_ids_of_a_rank_are_selected_by_their_words(case: GoldenCase) -> None:
    ids = [
        i.id
        for i in enumerated(case, "dp2-tp2", parallel__dp=2, parallel__tp=2, batching__micro_batch_size=1)
    ]
    assert len(set(ids)) == len(ids)
    chosen = [i for i in ids if all(word in i for word in ("tp2", "rank1", "micro0", "/log_probs"))]
    assert chosen == [f"dense/dp2-tp2/step{step}/rank1/micro0/log_probs" for step in range(3)]


@pytest.mark.parametrize(("mesh", "ranks"), [({}, 1), ({"parallel__dp": 2, "parallel__tp": 2}, 4)])
def test_full_tensors_have_one_test_a_rank_and_the_update_one(
    case: GoldenCase, mesh: dict[str, int], ranks: int
) -> None:
    count = Counter((i.place.rank, i.quantity) for i in enumerated(case, **mesh) if i.place.micro is None)
    steps = 3
    assert count == {
        **{(rank, quantity): steps for rank in range(ranks) for quantity in WHOLE},
        (None, "trajectory"): steps,
        (None, "coverage"): steps,
        (None, "invariants"): steps,
        **({(None, "replicas"): steps} if ranks > 1 else {}),
    }


@pytest.mark.parametrize(("schedule", "rank"), [("gpipe", 1), ("zbv_zero_bubble", 0)])
def test_values_of_the_loss_are_tested_where_they_are(case: GoldenCase, schedule: str, rank: int) -> None:
    found = enumerated(case, parallel__pp=2, parallel__pp_schedule=schedule)
    places = {(i.place.rank, i.quantity) for i in found if i.place.micro is not None}
    assert {(r, q) for r, q in places if q in LOSS} == {(rank, q) for q in LOSS}
    assert {r for r, q in places if q in ("batch_inputs", "activations")} == {0, 1}


def test_what_could_not_fail_has_no_test(case: GoldenCase) -> None:
    """With more ranks than samples some hold no token: what they read and their share of the loss remain."""
    samples = len(case.trajectories()[0])
    found = enumerated(case, parallel__dp=2 * samples, batching__micro_batch_size=1)
    empty = {i.quantity for i in found if i.place.rank == samples and i.place.micro == 0}
    assert empty == {"batch_inputs", "loss"}
    full = {i.quantity for i in found if i.place.rank == samples - 1 and i.place.micro == 0}
    assert full > LOSS | {"batch_inputs", "activations"}
