"""Margins of the sampler's decisions are distances to another outcome."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regress.engine.decision_margins import (
    ArgmaxMargins,
    TopKMargins,
    TopPMargins,
    margins,
    note_draws,
    watched,
)
from regress.engine.sampling import inverse_cdf

NO_IDS = torch.zeros((1, 0), dtype=torch.int64)


@given(
    weights=st.lists(st.floats(0.01, 1.0), min_size=2, max_size=8),
    uniform=st.floats(0.0, 1.0, exclude_max=True),
)
def test_a_draw_that_moves_by_less_than_its_margin_is_the_same(weights: list[float], uniform: float) -> None:
    probs = torch.tensor([weights], dtype=torch.float64)
    number = torch.tensor([uniform], dtype=torch.float64)
    chosen = inverse_cdf(probs, number)
    with margins() as found:
        note_draws(probs, number, chosen)
    (margin,) = found
    for by in (-0.99, 0.99):
        moved = (number + by * margin).clamp(0.0, 1.0 - 1e-15)
        assert inverse_cdf(probs, moved).equal(chosen)
    beyond = [number + by * margin for by in (-1.01, 1.01)]
    inside = [one for one in beyond if 0.0 <= float(one) < 1.0]
    assert margin < 1e-9 or not inside or any(not inverse_cdf(probs, one).equal(chosen) for one in inside)


def test_leads_and_cuts() -> None:
    scores = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).log()
    with margins() as found:
        ArgmaxMargins()(NO_IDS, scores)
        TopKMargins(2)(NO_IDS, scores)
        TopKMargins(3)(NO_IDS, scores)  # nothing is dropped
        TopPMargins(0.75)(NO_IDS, scores)
    lead = float(torch.log(torch.tensor(1.5, dtype=torch.float64)))
    assert found == pytest.approx([0.2, lead, 0.05])


def test_nothing_is_noted_outside() -> None:
    assert not watched()
    scores = torch.zeros((1, 3))
    assert ArgmaxMargins()(NO_IDS, scores) is scores
    with margins() as found:
        pass
    ArgmaxMargins()(NO_IDS, scores)
    assert found == []
