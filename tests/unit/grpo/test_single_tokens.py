"""Means over a single token, whose count a lower bound must not change."""

from __future__ import annotations

import pytest
import torch

from regress.grpo.fields import ObjectiveFields
from regress.grpo.loss_aggregation import entropy_weights


@pytest.mark.parametrize(("scope", "wanted"), [("global", 1.0), ("microbatch", 0.5)])
def test_the_entropy_of_a_single_token_weighs_one(scope: str, wanted: float) -> None:
    kept = torch.tensor([False, False, True])
    objective = ObjectiveFields(entropy_coef=0.1, entropy_aggregation="token-mean", entropy_scope=scope)
    found = entropy_weights(torch.tensor([0, 1, 1]), 2, objective, partition=[[0], [1]], kept_K=kept)
    assert found is not None
    assert found.tolist() == [0.0, 0.0, wanted]
