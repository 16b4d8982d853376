"""Faults of log-probs: their normalizer, a limit, rows in half precision, and targets in other parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from regress.engine import policy
from regress.engine.projection import chunked_log_probs
from regress.engine.trainer import Trainer
from regress.grpo.logprobs import TokenLogProbs, logits_gradient, token_log_probs
from regress.parallel import vocabulary
from tests.faults.fault import fault
from tests.faults.patch import Patch
from tests.faults.rounding import rounded

LEAST = -4.0
"""Log-prob below which the golden cases have a few tokens."""


@fault(
    category="C",
    fresh=True,
    source="a vocabulary-parallel cross entropy whose backward pass forgets the mask of its targets",
    variants=("tp2-packed-chunk7",),
    first="logit_gradient logit_gradient",
    ranks=(0, 1),
    rules=("logit-gradient-shard", "logit-gradient", "log-softmax-backward", "inputs-hold"),
)
def targets_elsewhere_taught_at_the_edge(patch: Patch) -> None:
    """On its way back a rank takes a target of another part for its own first or last id, as a clamp leaves it."""

    def wrong(logits: Tensor, columns: Tensor, *rest: Any) -> Tensor:
        return logits_gradient(logits, columns.clamp(0, logits.shape[-1] - 1), *rest)

    patch.setattr(vocabulary, "logits_gradient", wrong)


@fault(
    category="H",
    fresh=True,
    source="a fused kernel that tempers the logit of the target, and takes the log-sum-exp of plain logits",
    cases=("dr_grpo",),
    variants=("packed-chunked-mbs4",),
    first="log_probs log_probs",
    rules=("log-softmax", "temperature", "inputs-hold"),  # the first one names the temperature
)
def normalizer_without_temperature(patch: Patch) -> None:
    """The logit of a target is divided by the temperature, and the logits that normalize it are not."""
    right: Any = token_log_probs

    def wrong(logits: Tensor, *args: Any, temperature: float, **rest: Any) -> TokenLogProbs:
        found: TokenLogProbs = right(logits, *args, temperature=temperature, **rest)
        shift = (logits / temperature).logsumexp(-1) - logits.logsumexp(-1)
        return replace(found, log_probs=found.log_probs + shift)

    patch.setattr(policy, "token_log_probs", wrong)


@fault(
    category="H",
    fresh=True,
    source="log-probs that are held above a least one against overflow of the ratio",
    cases=("tools",),
    variants=("packed",),
    first="log_probs log_probs",
    rules=(
        "log-softmax",
        "single-tokens",
        "inputs-hold",
    ),  # names a change afterwards, and a limit of few tokens
)
def improbable_tokens_raised(patch: Patch) -> None:
    """Log-probs below -4 are raised to it."""
    right: Any = token_log_probs

    def wrong(*args: Any, **rest: Any) -> TokenLogProbs:
        found: TokenLogProbs = right(*args, **rest)
        return replace(found, log_probs=found.log_probs.clamp(min=LEAST))

    patch.setattr(policy, "token_log_probs", wrong)


@fault(
    category="O",
    kind="precision",
    fresh=True,
    source="a fused projection that casts its rows to half precision",
    variants=("chunked",),
    first="activations lm_head",
    rules=("output-projection", "module", "precision", "inputs-hold"),
)
def rows_of_chunks_in_bfloat16(patch: Patch) -> None:
    """Hidden states are rounded to half precision before they are projected chunk by chunk."""

    def wrong(model: Any, hidden: Tensor, *args: Any, **rest: Any) -> TokenLogProbs:
        return chunked_log_probs(model, rounded(hidden), *args, **rest)

    patch.setattr(policy, "chunked_log_probs", wrong)


@fault(
    category="O",
    kind="precision",
    fresh=True,
    source="old log-probs that workers return in half precision",
    cases=("cispo",),
    variants=("dp2-packed-mbs3",),
    first="old_log_probs",
    rules=("rounded", "old-log-probs", "softmax-dtype", "precision", "inputs-hold"),
)
def log_probs_of_ranks_joined_in_bfloat16(patch: Patch) -> None:
    """Ranks hand the log-probs that they recompute before the first update to each other in half precision."""
    right: Any = Trainer._collected

    def wrong(self: Trainer, *args: Any) -> Tensor:
        return rounded(right(self, *args))

    patch.setattr(Trainer, "_collected", wrong)
