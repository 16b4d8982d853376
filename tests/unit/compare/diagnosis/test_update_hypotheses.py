"""Each hypothesis on an optimizer update is what AdamW makes with that very mistake."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from regress.compare.diagnosis.update_hypotheses import UpdateHypotheses

SETTINGS = {"learning_rate": 0.02, "eps": 1e-8, "weight_decay": 0.03, "betas": [0.9, 0.99]}
STEPS = 4


def updated(*, coupled: bool = False, counter: int = 0) -> dict[str, Any]:
    """State and parameters after an update; golden but for its mistakes."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(5, 3, dtype=torch.float64))
    optimizer = torch.optim.AdamW([weight], lr=0.02, eps=1e-8, betas=(0.9, 0.99), weight_decay=0.03)
    for step in range(STEPS):
        weight.grad = gradient = torch.randn(5, 3, dtype=torch.float64)
        if step == STEPS - 1:
            optimizer.state[weight]["step"] += counter
            if coupled:
                optimizer.param_groups[0]["weight_decay"] = 0.0
                weight.grad = gradient + 0.03 * weight.detach()
        optimizer.step()
    state = optimizer.state[weight]
    return {
        "gradient": {"w": gradient.numpy()},
        "param": {"w": weight.detach().numpy()},
        "optimizer": {f"w/{key}": np.asarray(state[key]) for key in ("exp_avg", "exp_avg_sq", "step")},
    }


def test_weight_decay_in_the_gradient() -> None:
    known, wrong = UpdateHypotheses(updated(), SETTINGS), updated(coupled=True)
    (found,) = (
        h for h in known.of("optimizer", "w/exp_avg") if "plus its parameters times" in h.numbers["what"]
    )
    assert found.direction is not None
    np.testing.assert_allclose(
        found.values + 0.03 * found.direction, wrong["optimizer"]["w/exp_avg"], rtol=0, atol=1e-13
    )


@pytest.mark.parametrize(("counter", "words"), [(1, "one ahead"), (-1, "one behind")])
def test_a_step_counter_that_is_off_by_one(counter: int, words: str) -> None:
    known, wrong = UpdateHypotheses(updated(), SETTINGS), updated(counter=counter)
    (found,) = (h for h in known.of("param", "w") if h.numbers["what"].endswith(words))
    np.testing.assert_allclose(found.values, wrong["param"]["w"], rtol=0, atol=1e-13)
