"""Advantages of several reward functions and of bounded rewards against loops over plain numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from regress.grpo.advantage_computation import token_advantages
from regress.grpo.fields import ObjectiveFields
from tests.unit.grpo.plain_advantages import (
    NAN,
    Batch,
    batch,
    expected,
    found,
    mean,
    of_grpo,
    of_rloo,
    over_tokens,
    std,
    whitened,
)

TWO = [[0.5, 1.0], [1.5, NAN], [0.2, 3.0], [1.0, 1.0], [0.1, 0.9]] * 2
"""Rewards of ten samples by two functions, one of them missing."""


def columns(given: Batch, weights: Sequence[float]) -> list[Batch]:
    return [
        Batch([weight * row[number] for row in TWO], given.groups, given.lengths)
        for number, weight in enumerate(weights)
    ]


def test_several_reward_functions() -> None:
    given, weights = batch(6), (2.0, -0.5)
    total = [math.fsum(w * r for w, r in zip(weights, row, strict=True) if not math.isnan(r)) for row in TWO]
    fields: dict[str, Any] = {"scale": "group", "ddof": 1, "single_sample": "zero", "eps": 0.01}
    plain = expected(Batch(total, given.groups, given.lengths), of_grpo, fields)
    actual = found(given, rewards=TWO, reward_weights=weights, missing_rewards="exclude", **fields)
    assert actual == pytest.approx(over_tokens(given, plain), rel=1e-12)
    parts = [expected(one, of_grpo, fields) for one in columns(given, (1.0, 1.0))]
    summed = [
        math.fsum(w * part[n] for w, part in zip(weights, parts, strict=True) if not math.isnan(part[n]))
        for n in range(10)
    ]
    wanted = whitened(over_tokens(given, summed), 1, 1e-8)
    actual = found(
        given, rewards=TWO, reward_weights=weights, missing_rewards="exclude", advantage="gdpo", **fields
    )
    assert actual == pytest.approx(wanted, rel=1e-11)


def test_functions_that_are_normalized_before_their_sum() -> None:
    given, weights = batch(7), (2.0, -0.5)
    given.groups = [5, 5, 5, 2, 2, 2, 1, 1, 1, 1]
    fields: dict[str, Any] = {"ddof": 1, "eps": 0.01}
    parts = [
        expected(one, of_grpo, {"scale": "group", "single_sample": "zero", **fields})
        for one in columns(given, (1.0, 1.0))
    ]
    summed = [
        math.fsum(w * part[n] for w, part in zip(weights, parts, strict=True) if not math.isnan(part[n]))
        for n in range(10)
    ]
    scale = std(summed, 1) + 0.01
    wanted = [(value - mean(summed)) / scale for value in summed]
    actual = found(
        given,
        rewards=TWO,
        reward_weights=weights,
        missing_rewards="exclude",
        reward_aggregation="normalize_then_sum",
        **fields,
    )
    assert actual == pytest.approx(over_tokens(given, wanted), rel=1e-11)


def test_normalized_advantages_and_bounds_of_rewards() -> None:
    given = batch(8)
    fields: dict[str, Any] = {"scale": "none", "ddof": 1, "single_sample": "raw", "eps": 0.01}
    bounded = [min(max(reward, -0.3), 0.4) for reward in given.rewards]
    plain = expected(Batch(bounded, given.groups, given.lengths), of_rloo, fields)
    scale = std(plain, 1) + 0.01
    wanted = [(value - mean(plain)) / scale for value in plain]
    actual = found(
        given, advantage="rloo", reward_min=-0.3, reward_max=0.4, normalize_advantages=True, **fields
    )
    assert actual == pytest.approx(over_tokens(given, wanted), rel=1e-11)
    ends: list[dict[str, Any]] = [{"reward_min": -0.3}, {"reward_max": 0.4}]
    for one in ends:
        bounds = {"reward_min": -math.inf, "reward_max": math.inf, **one}
        clipped = [min(max(r, bounds["reward_min"]), bounds["reward_max"]) for r in given.rewards]
        plain = expected(Batch(clipped, given.groups, given.lengths), of_rloo, fields)
        assert found(given, advantage="rloo", **one, **fields) == pytest.approx(over_tokens(given, plain))


def test_statistics_of_single_functions_are_taken_in_double_precision() -> None:
    rewards = torch.tensor([[1000.1, 1.0], [1000.2, 3.0], [1000.4, 2.0]], dtype=torch.float32)
    fields = ObjectiveFields(reward_aggregation="normalize_then_sum", eps=0.0)
    of_samples = torch.zeros(3, dtype=torch.int64), torch.arange(3)
    single = token_advantages(rewards, *of_samples, fields)
    assert single.dtype == torch.float32
    assert single.tolist() == token_advantages(rewards.double(), *of_samples, fields).float().tolist()
