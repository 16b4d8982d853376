"""Metrics of an update follow from those of its microbatches, however these were cut."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regress.compare.alignment.metric_scale import metric_scale, size_of
from regress.compare.updates.invariant_counts import Checked
from regress.compare.updates.metric_invariants import MetricPart, check_combined, check_part, joined, parts_of
from regress.dump.coordinates import Coordinates
from regress.dump.record import Record, replace_tensors

KINDS = ("mean", "min", "max")
values = st.lists(st.integers(-6400, 6400).map(lambda number: number / 64), min_size=1, max_size=30)
"""Numbers whose sums are exact, in whatever order: what is off is then off by what was added."""


def part(kind: str, found: list[float]) -> list[Any]:
    total = {"mean": sum, "min": min, "max": max}[kind](found) if found else 0.0
    return [float(total), len(found), kind]


def loss(micro: int, cut: list[float]) -> Record:
    meta = {"metric_parts": {kind: part(kind, cut) for kind in KINDS}}
    return Record.of("loss", Coordinates(0, rank=0, micro=micro), {"loss": float(sum(cut))}, meta)


def report(found: list[float]) -> Record:
    numbers = {"mean": float(np.mean(found)), "min": min(found), "max": max(found), "loss": float(sum(found))}
    return Record.of("metrics", Coordinates(0, rank=0), {f"training_step/{n}": v for n, v in numbers.items()})


def cuts(found: list[float], at: list[int]) -> list[list[float]]:
    ends = sorted(number % (len(found) + 1) for number in at)
    return [found[a:b] for a, b in zip([0, *ends], [*ends, len(found)], strict=True)]


@given(found=values, at=st.lists(st.integers(0, 100), max_size=4))
def test_any_cut_of_the_tokens_gives_the_metrics_of_the_update(found: list[float], at: list[int]) -> None:
    known = Checked()
    records = [loss(micro, cut) for micro, cut in enumerate(cuts(found, at))]
    check_combined(known, records, {"of rank 0": report(found)})
    assert known.count == 4
    assert not known.broken


@pytest.mark.parametrize("name", ["mean", "min", "max", "loss"])
@given(found=values, more=st.floats(1e-6, 10))
def test_each_metric_that_is_off_is_named(name: str, found: list[float], more: float) -> None:
    known, wrong = Checked(), report(found)
    actual = wrong.tensors[f"training_step/{name}"]
    wrong.tensors[f"training_step/{name}"] = actual + more
    check_combined(known, [loss(0, found)], {"of rank 3": wrong})
    assert [one.where for one in known.broken] == [f"training_step/{name} of rank 3"]


def test_a_mean_of_means_is_off() -> None:
    known, right = Checked(), report([1.0, 2.0, 6.0])
    right.tensors["training_step/mean"] = np.array((1.5 + 6.0) / 2)
    check_combined(known, [loss(0, [1.0, 2.0]), loss(1, [6.0])], {"of rank 0": right})
    assert [one.where for one in known.broken] == ["training_step/mean of rank 0"]


@pytest.mark.parametrize(
    "told", [None, 3, {"x": 1}, {"x": [1, 2]}, {"x": ["1", 2, "mean"]}, {"x": [1.0, -1, "mean"]}]
)
def test_parts_of_another_form_are_left_out(told: Any) -> None:
    record = Record.of("loss", Coordinates(0, rank=0, micro=0), {"loss": 1.0}, {"metric_parts": told})
    assert parts_of(record) == {}


def test_nothing_counted_is_nothing() -> None:
    assert joined([MetricPart(0.0, 0, "mean")]) is None


def test_a_part_is_that_of_its_tokens() -> None:
    known = Checked()
    check_part(known, "kl", MetricPart(3.0, 2, "mean"), np.array([1.0, 2.0]), "here")
    check_part(known, "ratio/max", MetricPart(2.0, 2, "max"), np.array([1.0, 2.0]), "here")
    assert not known.broken
    check_part(known, "ratio/max", MetricPart(1.5, 2, "max"), np.array([1.0, 2.0]), "here")
    assert [one.where for one in known.broken] == ["ratio/max here"]


RATIOS = np.exp(np.random.default_rng(0).normal(0, 2, 300))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_part_may_be_computed_in_any_order_in_the_dtype_of_its_tokens(dtype: torch.dtype) -> None:
    log_ratio = torch.from_numpy(np.log(RATIOS)).to(dtype)
    values = log_ratio.exp()
    known, others = Checked(), 1 + torch.expm1(log_ratio)
    total = float(functools.reduce(torch.add, values.flip(0)))
    check_part(known, "ratio/mean", MetricPart(total, 300, "mean"), values.numpy(), "here")
    check_part(known, "ratio/min", MetricPart(float(others.min()), 300, "min"), values.numpy(), "here")
    check_part(known, "ratio/max", MetricPart(float(others.max()), 300, "max"), values.numpy(), "here")
    assert not known.broken
    lost, second = values[1:], values.sort().values[1]
    check_part(known, "ratio/mean", MetricPart(float(lost.sum()), 300, "mean"), values.numpy(), "here")
    check_part(known, "ratio/min", MetricPart(float(second), 300, "min"), values.numpy(), "here")
    assert [one.where for one in known.broken] == ["the sum of ratio/mean here", "ratio/min here"]


def test_metrics_of_a_run_in_float32_may_be_put_together_in_float32() -> None:
    found = [float(value) for value in RATIOS]
    parts = [loss(micro, cut) for micro, cut in enumerate(cuts(found, [70, 200]))]
    narrow = [replace_tensors(r, {"loss": np.asarray(r.tensors["loss"], np.float32)}) for r in parts]
    whole = report(found)
    rounded = {name: np.asarray(np.float32(value), np.float64) for name, value in whole.tensors.items()}
    known, wide = Checked(), Checked()
    check_combined(known, narrow, {"of rank 0": replace_tensors(whole, rounded)})
    assert not known.broken
    check_combined(wide, parts, {"of rank 0": replace_tensors(whole, rounded)})
    assert wide.broken
    off = {name: 1.001 * value + 1e-3 for name, value in rounded.items()}
    check_combined(known, narrow, {"of rank 0": replace_tensors(whole, off)})
    assert len(known.broken) == 4


def test_scales_are_those_of_what_a_mean_is_of() -> None:
    truth = {"kl": {"kl": np.array([0.0, -3.0])}, "ratio": {"prob_ratio": np.array([1.0, np.exp(2.0)])}}

    def scale(name: str, value: float) -> float:
        return metric_scale(name, np.array(value), truth, lambda _: 7.0)

    assert scale("training_step/kl", 1e-3) == 3.0
    assert scale("training_step/ratio/min", 1e-4) == pytest.approx(np.exp(2.0))
    assert scale("training_step/loss", 1e-9) == 7.0
    assert scale("training_step/clip_ratio/high", 0.0) == 1.0
    assert scale("training_step/approx_kl/k1", 0.1) == pytest.approx(2.0)
    assert scale("training_step/learning_rate", 1e-6) == 1e-6
    assert scale("training_step/policy_loss", 0.5) == 0.5


def test_losses_that_hold_the_log_prob_are_as_far_off_as_log_probs_are() -> None:
    """Where the policy is certain of its tokens they come out as rounding alone."""
    truth = {
        "policy_loss": {"policy_loss": np.array([0.0, -1e-19])},
        "advantages": {"advantages": np.array([0.0, -0.5])},
        "log_probs": {"log_probs": np.array([-4.0, -1e-16])},
    }
    lost = truth["policy_loss"]["policy_loss"]
    assert size_of("policy_loss", lost, truth) == 2 / 1024
    assert metric_scale("training_step/policy_loss", np.array(1e-19), truth, lambda _: 7.0) == 2 / 1024
    assert size_of("policy_loss", np.array([0.5]), truth) == 0.5
    assert size_of("kl", lost, truth) == 1e-19
