"""The KL that goes into rewards."""

import pytest
import torch

from regress.grpo.argument_checks import InputError
from regress.grpo.kl_divergence import kl_penalty
from regress.grpo.objective_presets import make_objective


def test_penalty_is_the_weighted_estimate_without_gradient() -> None:
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    ref = torch.tensor([-1.5, -1.0], requires_grad=True)
    objective = make_objective(kl_coef=0.5, kl_estimator="k1", kl_placement="reward")
    penalty = kl_penalty(log_probs, ref, objective)
    assert penalty.tolist() == [0.25, -0.5]
    assert not penalty.requires_grad


def test_penalty_needs_a_reference_of_the_same_length() -> None:
    objective = make_objective("trl:rloo")
    with pytest.raises(InputError, match=r"ref_log_probs_K is missing: a KL in the reward needs log-probs"):
        kl_penalty(torch.zeros(2), None, objective)
    with pytest.raises(InputError, match=r"ref_log_probs_K has shape \(3,\) where log_probs_K has \(2,\)"):
        kl_penalty(torch.zeros(2), torch.zeros(3), objective)
