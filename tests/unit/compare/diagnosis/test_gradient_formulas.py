"""The gradient of the KL term is known for every estimator, so that each is told from all others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from regress.compare.diagnosis.gradient_formulas import TokenGradients
from regress.grpo.catalogue import KL_ESTIMATORS
from regress.grpo.kl import kl_estimate
from regress.grpo.objective import Objective

SIZE, COEFFICIENT = 20, 0.1
OBJECTIVE = Objective(kl_coef=COEFFICIENT)


def made(estimator: str, policy: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Return an estimate and its derivative by each log-prob."""
    own = policy.clone().requires_grad_()
    found = kl_estimate(own, reference, replace(OBJECTIVE, kl_estimator=estimator))
    (slope,) = torch.autograd.grad(found.sum(), own)
    return found.detach(), slope


def told(estimator: str, actual: str) -> list[str]:
    """Return the formulas that equal the gradient of one estimator where golden values have that of another."""
    torch.manual_seed(0)
    policy, reference = -torch.rand(2, SIZE, dtype=torch.float64)
    values, slope = made(estimator, policy, reference)
    wrong = made(actual, policy, reference)[1]
    rest, weights = torch.randn(SIZE, dtype=torch.float64), torch.rand(SIZE, dtype=torch.float64)
    golden = {
        "log_probs": policy,
        "ref_log_probs": reference,
        "kl": values,
        "weights": weights,
        "token_gradient": rest + weights * COEFFICIENT * slope,
    }
    known = {name: one.numpy() for name, one in golden.items()}
    objective = {"kl_coef": COEFFICIENT, "kl_estimator": estimator}
    gradients = TokenGradients(known.get, np.array([0, SIZE]), np.ones(SIZE, bool), objective, None)
    expected = (rest + weights * COEFFICIENT * wrong).numpy()
    return [
        guess.numbers["what"]
        for guess in gradients.of("token_gradient")
        if guess.id == "formula" and np.allclose(guess.values, expected, rtol=1e-12, atol=1e-14)
    ]


@pytest.mark.parametrize("actual", ["k1", "k2", "k3"])
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_the_gradient_of_another_estimator_is_told(estimator: str, actual: str) -> None:
    found = [words for words in told(estimator, actual) if "estimator" in words]
    assert found == ([] if estimator == actual else [f"the gradient of the estimator {actual}"])
