"""Precision faults of positions, experts, temperatures, and one rank's part of a module."""

from __future__ import annotations

from typing import Any

import torch

from regress.engine.build import Run
from regress.parallel import expert
from tests.faults.fault import fault
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import AFTER_ATTENTION, on_rank
from tests.faults.rounding import outputs_rounded, rounded


@fault(
    category="O",
    kind="precision",
    fresh=True,
    source="a table of positions that is kept in half precision beside embeddings in full",
    cases=("gpt2",),
    variants=("left",),
    first="activations transformer.wpe",
    names=r"transformer\.(wpe|h\.|ln_f).*|lm_head",
    rules=("position-embedding", "module-dtype", "module", "precision", "inputs-hold"),
)
def embeddings_of_positions_in_bfloat16(run: Run) -> None:
    """Embeddings of positions are rounded to half precision, and those of tokens are not."""
    outputs_rounded(run, "wpe")


@fault(
    category="O",
    kind="precision",
    fresh=True,
    source="DeepEP: rows that are combined in half precision",
    cases=("moe",),
    variants=("ep2-cp2-packed",),
    first="activations model.layers.0",
    names=AFTER_ATTENTION,
    ranks=(0, 1, 2, 3),
    rules=("expert-exchange", "router", "module", "precision", "inputs-hold"),
)
def rows_return_from_experts_in_bfloat16(patch: Patch) -> None:
    """Return the outputs of experts to the ranks of their tokens in half precision."""
    right: Any = expert._run
    patch.setattr(expert, "_run", lambda *args: rounded(right(*args)))


@fault(
    category="O",
    kind="precision",
    fresh=True,
    source="a temperature that is a tensor of the dtype of logits under autocast",
    cases=("dr_grpo",),
    variants=("tp2-packed-chunk7",),
    first="log_probs",
    ranks=(0, 1),
    rules=("temperature", "log-softmax", "vocabulary-parts", "precision", "inputs-hold"),
)
def temperature_in_bfloat16(run: Run) -> None:
    """Logits are divided by the number of half precision that is nearest to the temperature."""
    policy = run.trainer.policy
    policy.temperature = float(torch.tensor(policy.temperature).bfloat16())


@fault(
    category="T",
    kind="precision",
    fresh=True,
    source="a fused kernel of another release on one host, which takes activations in half precision",
    variants=("tp2-sp",),
    first="activations model.layers.0",
    names=AFTER_ATTENTION,
    ranks=(0, 1),
    rules=("tensor-exchange", "module", "precision", "inputs-hold"),  # the sum over ranks spreads it to all
)
def activation_of_a_rank_in_bfloat16(run: Run) -> None:
    """One of two tensor-parallel ranks gives its part of the activations of an MLP in half precision."""
    if on_rank(1):
        outputs_rounded(run, "act_fn")
