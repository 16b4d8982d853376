"""A value that is its bound exactly is neither clipped, capped nor mistrusted."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from regress.grpo.objective_presets import make_objective
from regress.grpo.policy_losses import FLOOR
from regress.grpo.token_losses import token_loss


@pytest.mark.parametrize(
    ("advantage", "fields"),
    [
        (-1.0, {"clip_bounds": "absolute", "clip_low": 1.0, "clip_high": 2.0}),
        (1.0, {"clip_bounds": "absolute", "clip_low": 0.5, "clip_high": 1.0}),
        (-1.0, {"loss": "geo_mean", "clip_low": 0.0, "clip_high": 0.2}),
        (1.0, {"loss": "geo_mean", "clip_low": 0.2, "clip_high": 0.0}),
    ],
)
def test_a_ratio_that_is_its_bound_is_not_clipped(advantage: float, fields: dict[str, Any]) -> None:
    same = torch.tensor([-1.5], dtype=torch.float64)
    given = same, same, torch.full_like(same, advantage), torch.tensor([0]), 1
    loss = token_loss(*given, make_objective(**fields))
    assert not (loss.clipped_low_K | loss.clipped_high_K).any()


def test_a_loss_that_is_its_cap_is_not_clipped() -> None:
    new, old = torch.tensor([2.0], dtype=torch.float64).log(), torch.zeros(1, dtype=torch.float64)
    loss = token_loss(new, old, old - 1.0, torch.tensor([0]), 1, make_objective(dual_clip=2.0))
    assert loss.policy_K.tolist() == [2.0]
    assert not loss.dual_clipped_K.any()


@pytest.mark.parametrize(("advantage", "field"), [(1.0, "clip_high"), (-1.0, "clip_low")])
def test_a_difference_of_probabilities_that_is_its_bound_is_trusted(advantage: float, field: str) -> None:
    new, old = torch.tensor([0.5 + 0.25 * advantage, 0.5], dtype=torch.float64).log().view(2, 1)
    edge = abs(float(new.exp() - old.exp()))
    for bound, trusted in ((edge, True), (math.nextafter(edge, 0.0), False)):
        objective = make_objective(loss="dppo_tv", **{field: bound})
        found = token_loss(new, old, torch.full_like(new, advantage), torch.tensor([0]), 1, objective)
        assert (found.loss_K.item() != 0.0) == trusted


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_token_at_the_edge_of_the_trust_region_is_trusted(advantage: float) -> None:
    new, old = torch.tensor([0.5 + 0.1 * advantage, 0.5], dtype=torch.float64).log().view(2, 1)
    p, q = new.exp(), old.exp()
    rest = torch.log((1.0 - q + FLOOR) / (1.0 - p + FLOOR))
    edge = float(q * (old - new) + (1.0 - q) * rest)
    field = "clip_high" if advantage > 0 else "clip_low"
    for bound, trusted in ((edge, True), (math.nextafter(edge, 0.0), False)):
        objective = make_objective(loss="dppo_kl", **{field: bound})
        found = token_loss(new, old, torch.full_like(new, advantage), torch.tensor([0]), 1, objective)
        assert (found.loss_K.item() != 0.0) == trusted
