"""Metrics add up: the parts of a batch together say what the whole batch says."""

import math
from collections.abc import Callable
from functools import reduce
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regress.grpo.named_metrics import trl_metrics, verl_metrics
from regress.grpo.objective_presets import make_objective
from regress.grpo.token_losses import token_loss
from regress.grpo.update_metrics import Metric, add_metrics, token_metrics


def test_values_by_hand() -> None:
    new = torch.tensor([0.5, -0.5, 0.0, 3.0], dtype=torch.float64)
    objective = make_objective(dual_clip=3.0)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    loss = token_loss(
        new,
        torch.zeros(4).double(),
        advantages,
        torch.tensor([0, 0, 1, 1]),
        2,
        objective,
        entropy_K=new.abs(),
    )
    found = {name: metric.value for name, metric in token_metrics(loss).items()}
    expected = pytest.approx(
        {
            "policy_loss": (-1.2 + 0.8 - 1 + 3) / 4,
            "clip_ratio/low": 0.25,
            "clip_ratio/high": 0.25,
            "clip_ratio/dual": 0.25,
            "approx_kl/k1": -0.75,
            "approx_kl/k3": sum(math.exp(x) - 1 - x for x in new.tolist()) / 4,
            "ratio/mean": sum(math.exp(x) for x in new.tolist()) / 4,
            "ratio/min": math.exp(-0.5),
            "ratio/max": math.exp(3.0),
            "entropy": 1.0,
        }
    )
    assert {name: found[name] for name in expected.expected} == expected
    assert not {"kl", "sampler_weight", "kept"} & found.keys()  # of terms that this loss has not


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), cuts=st.lists(st.integers(0, 9), max_size=4))
def test_microbatches_add_up_to_the_batch(
    make_batch: Callable[..., Any], run_batch: Callable[..., Any], seed: int, cuts: list[int]
) -> None:
    objective = make_objective(
        "trl:dapo", kl_coef=0.1, sampler_correction="token_truncate", correction_max=1.1, entropy_coef=0.1
    )
    batch = make_batch(seed)
    edges = [0, *sorted(cuts), batch.num_sequences]
    parts = [range(a, b) for a, b in pairwise(edges)]  # some may be empty
    whole = token_metrics(run_batch(batch, objective, [range(batch.num_sequences)])[2][0])
    losses = run_batch(batch, objective, [part for part in parts if len(part)])[2]
    together = reduce(add_metrics, [token_metrics(loss) for loss in losses], {})
    assert together.keys() == whole.keys()
    for name, metric in whole.items():
        assert together[name].count == metric.count
        assert together[name].value == pytest.approx(metric.value, rel=1e-11, abs=1e-12)


def test_sums_are_wider_than_their_terms() -> None:
    log_p = torch.zeros(2)
    entropy = torch.tensor([2.0**24, 1.0])
    loss = token_loss(log_p, log_p, log_p, torch.tensor([0, 0]), 1, make_objective(), entropy_K=entropy)
    assert token_metrics(loss)["entropy"].total == 2**24 + 1


def test_nothing_counted_is_no_number_and_no_extreme() -> None:
    empty = torch.zeros(0)
    nothing = token_metrics(token_loss(empty, empty, empty, empty.long(), 1, make_objective()))
    assert all(math.isnan(metric.value) for metric in nothing.values())
    negative = {"ratio/max": Metric(-1.0, 2, "max")}
    assert add_metrics(nothing, negative)["ratio/max"].value == -1.0


def test_different_kinds_do_not_add() -> None:
    with pytest.raises(ValueError, match=r"a mean and a min do not add up"):
        Metric(1.0, 1) + Metric(1.0, 1, "min")


@pytest.mark.parametrize(("preset", "least"), [("trl:dapo", 1.0), ("gspo", 0.0)])
def test_a_row_without_loss_tokens_counts_for_trl_where_ratios_are_of_rows(preset: str, least: float) -> None:
    """At sequence level TRL has one ratio a row, and that of an empty one is 1: not clipped. Else it has no mean."""
    new = torch.tensor([-1.0, -0.5, -1.0], dtype=torch.float64)
    rows = torch.tensor([0, 0, 2])
    objective = make_objective(preset, kl_coef=0.0)
    advantages = torch.full((3,), -1.0, dtype=torch.float64)
    loss = token_loss(new, torch.zeros(3).double(), advantages, rows, 3, objective)
    found = trl_metrics(loss, rows, 3, objective)
    assert found["clip_ratio/low_min"].value == least
    assert found["clip_ratio/low_mean"].value == pytest.approx(1.0 if least else 2 / 3)


def test_ratios_of_dppo_above_their_cap_are_clipped_from_below_for_verl() -> None:
    old = torch.full((4,), 0.25, dtype=torch.float64).log()
    new = torch.tensor([0.5, 0.375, 0.75, 0.25], dtype=torch.float64).log()
    rows, advantages = torch.tensor([0, 0, 1, 1]), -torch.ones(4, dtype=torch.float64)
    objective = make_objective(loss="dppo_kl", delta=2.0, clip_low=0.1, clip_high=0.1)
    found = verl_metrics(token_loss(new, old, advantages, rows, 2, objective), objective)
    assert found["actor/pg_clipfrac"].value == 0.0
    assert found["actor/pg_clipfrac_lower"].value == 0.25  # of 2, 1.5, 3 and 1


@pytest.mark.parametrize("preset", ["verl:bypass_mode", "verl:bypass_mode-reinforce"])
def test_rejected_tokens_count_in_no_metric_of_verl(preset: str) -> None:
    """Rejection takes tokens out of verl's response mask, which all its metrics are means over."""
    old = torch.tensor([-1.0, -2.0, -0.5, -1.5], dtype=torch.float64)
    new = old + torch.tensor([0.5, -0.1, -1.2, -0.3], dtype=torch.float64)  # k3 of the third is 0.5
    rows, advantages = torch.tensor([0, 0, 1, 1]), torch.ones(4, dtype=torch.float64)
    objective = make_objective(preset, rejection="token_k3:0.3", correction_policy="current")
    loss = token_loss(new, old, advantages, rows, 2, objective, sampler_log_probs_K=old)
    found = {name: metric.value for name, metric in verl_metrics(loss, objective).items()}
    assert found["actor/ppo_kl"] == pytest.approx(-(0.5 - 0.1 - 0.3) / 3)
    assert found["actor/pg_clipfrac"] == pytest.approx(1 / 3 if preset == "verl:bypass_mode" else 0.0)
