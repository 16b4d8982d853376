"""The denominators: how a batch is cut, ordered or padded must not change what is optimized."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regress.grpo.objective_presets import PRESETS, make_objective

WHOLE: dict[str, Any] = {"entropy_scope": "global", "statistics_scope": "global", "norm_rule": "maximum"}
"""Everything is counted over the mini-batch, where a preset says that an engine counts by microbatch."""
GLOBAL = [name for name in PRESETS if make_objective(name).denominator_scope == "global"]
EXTRAS: dict[str, Any] = {
    **WHOLE,
    "kl_coef": 0.1,
    "kl_placement": "loss",
    "entropy_coef": 0.05,
    "top_entropy_quantile": 0.6,
    "off_policy_threshold": 0.1,
}
CORRECTION: dict[str, Any] = {"sampler_correction": "sequence_truncate", "correction_max": 1.2}
BYPASS: dict[str, Any] = {"rejection": "seq_mean_k1:0.8:1.3,token_k3:0.05", "correction_policy": "current"}


def extras(name: str) -> dict[str, Any]:
    """Every term and mask that the preset can have."""
    objective = make_objective(name)
    if objective.correction_policy == "current":
        return EXTRAS | BYPASS | {"correction_normalize": True}
    return EXTRAS | (BYPASS if objective.old_log_probs == "sampler" else CORRECTION)


WHOLE_BATCH = ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae", "gdpo", "gpg")


def relative(difference: torch.Tensor, reference: torch.Tensor) -> float:
    return float(difference.norm() / reference.norm().clamp(min=1e-300))


@pytest.mark.parametrize("name", GLOBAL)
@settings(deadline=None, max_examples=4)
@given(seed=st.integers(0, 10**6), data=st.data())
def test_neither_split_nor_order_changes_loss_or_gradient(
    make_batch: Callable[..., Any], run_batch: Callable[..., Any], name: str, seed: int, data: st.DataObject
) -> None:
    objective = make_objective(name, **extras(name))
    batch = make_batch(seed)
    order = data.draw(st.permutations(range(batch.num_sequences)))
    size = data.draw(st.integers(1, batch.num_sequences))
    parts = [order[start : start + size] for start in range(0, len(order), size)]
    whole_loss, whole_gradient, _ = run_batch(batch, objective, [range(batch.num_sequences)])
    loss, gradient, _ = run_batch(batch, objective, parts)
    assert float((loss - whole_loss).abs()) <= 1e-12 * max(1.0, float(whole_loss.abs()))
    assert relative(gradient - whole_gradient, whole_gradient) <= 1e-12


@pytest.mark.parametrize("name", ["bnpo", "trl:bnpo"])
def test_a_denominator_per_microbatch_does_depend_on_the_split(
    make_batch: Callable[..., Any], run_batch: Callable[..., Any], name: str
) -> None:
    objective, batch = make_objective(name), make_batch(0)
    _, whole, _ = run_batch(batch, objective, [range(9)])
    _, split, _ = run_batch(batch, objective, [range(2), range(2, 9)])
    assert relative(split - whole, whole) > 1e-3


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10**6), name=st.sampled_from(GLOBAL))
def test_a_group_gets_the_same_gradient_beside_other_groups(
    make_batch: Callable[..., Any], run_batch: Callable[..., Any], seed: int, name: str
) -> None:
    """With the sum as aggregation, the gradient of a batch is the sum over its groups, each taken alone."""
    objective = make_objective(name, aggregation="token-sum", **WHOLE)
    if objective.advantage in WHOLE_BATCH or objective.compares_tokens:
        return  # compared with the whole batch on purpose
    batch = make_batch(seed)
    _, whole, _ = run_batch(batch, objective, [range(9)])
    changed = make_batch(seed)
    changed.rewards[6:] = changed.rewards[6:].flip(0) * 3 + 1
    _, first_two, _ = run_batch(batch, objective, [range(6)])
    _, first_two_again, _ = run_batch(changed, objective, [range(6)])
    assert torch.equal(first_two, first_two_again)
    _, last, _ = run_batch(batch, objective, [range(6, 9)])
    assert relative(first_two + last - whole, whole) <= 1e-12
