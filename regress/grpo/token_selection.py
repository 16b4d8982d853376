"""Tokens that a loss tells apart by comparing them with the others of the batch.

Packages compare within a microbatch, whose cut then changes the loss. Here the caller gives the tokens to compare:
those of a mini-batch (``statistics_scope="global"``), whose marks are cut along with the tokens, or a microbatch's.
"""

# ruff: noqa: N815  (the suffix of a field is its shape)

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regress.grpo.argument_checks import InputError
from regress.grpo.fields import ObjectiveFields
from regress.grpo.objective_part import imported
from regress.grpo.policy_losses import LOSSES
from regress.grpo.sampler_corrections import sampler_weights
from regress.grpo.token_samples import Samples


@dataclass(frozen=True)
class TokenSelection:
    """Marks of tokens, [K] each; None where the objective needs none.

    Attributes:
        kept_K: False where the policy loss is left out.
        penalized_K: True where kl_cov adds its penalty.
    """

    kept_K: Tensor | None = None
    penalized_K: Tensor | None = None

    def select(self, index: Tensor) -> TokenSelection:
        """Return the marks of the tokens at ``index``."""
        return TokenSelection(
            **{name: None if each is None else each[index] for name, each in vars(self).items()}
        )


@dataclass(frozen=True)
class Compared:
    """Values that tokens are compared by, [K] each, without gradients."""

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    samples: Samples
    entropy: Tensor | None = None
    sampler_log_probs: Tensor | None = None


@torch.no_grad()
def marks_of(tokens: Compared, objective: ObjectiveFields) -> TokenSelection:
    """Return the marks of these tokens among each other.

    Raises:
        InputError: if the objective asks for entropies or log-probs that are not there.
    """
    compare = LOSSES[objective.loss].marks
    marks: TokenSelection = imported(compare)(tokens, objective) if compare else TokenSelection()
    if objective.top_entropy_quantile < 1.0:
        high = high_entropy(tokens.entropy, objective)
        marks = replace(marks, kept_K=high if marks.kept_K is None else high & marks.kept_K)
    return marks


@torch.no_grad()
def normalized_weights(tokens: Compared, objective: ObjectiveFields) -> Tensor:
    """Return the sampler weights of these tokens, divided by their mean if the objective asks for it."""
    assert tokens.sampler_log_probs is not None
    policy = tokens.log_probs if objective.correction_policy == "current" else tokens.old_log_probs
    samples = tokens.samples
    return sampler_weights(
        policy, tokens.sampler_log_probs, samples.sequence_K, samples.count, objective, samples.complete
    )


def undrawn(tokens: Compared, objective: ObjectiveFields) -> TokenSelection:
    """Return the marks of clip_cov, whose loss counts the tokens that were not drawn."""
    return TokenSelection(kept_K=~drawn_by_covariance(tokens, objective))


def penalized(tokens: Compared, objective: ObjectiveFields) -> TokenSelection:
    """Return the marks of kl_cov, whose penalty is added at the tokens of greatest covariance."""
    return TokenSelection(penalized_K=greatest_covariances(tokens, objective))


def covariances(tokens: Compared) -> Tensor:
    """Return ``(A - mean A) (log p - mean log p)`` of each token, [K] (arXiv 2505.22617, eq. 8)."""
    advantages, log_probs = tokens.advantages, tokens.log_probs
    return (advantages - advantages.mean()) * (log_probs - log_probs.mean())


def drawn_by_covariance(tokens: Compared, objective: ObjectiveFields) -> Tensor:
    """Return the tokens that clip_cov leaves out, bool of shape [K].

    ``max(1, int(cov_fraction K))`` of the unclipped tokens whose covariance lies between cov_low and cov_high, the
    first in an order of all K tokens that ``cov_seed`` gives. Source: verl 0.9 ``compute_policy_loss_clip_cov``, which
    draws them anew from the global generator.
    """
    drawn = torch.zeros(len(tokens.log_probs), dtype=torch.bool, device=tokens.log_probs.device)
    if not len(drawn):
        return drawn
    ratio = torch.exp(tokens.log_probs - tokens.old_log_probs)
    clipped = -tokens.advantages * ratio.clamp(*objective.clip_range) > -tokens.advantages * ratio
    cov = covariances(tokens)
    candidates = (cov > objective.cov_low) & (cov < objective.cov_high) & ~clipped
    order = draw_order(len(drawn), objective.cov_seed).to(drawn.device)
    chosen = order[candidates[order]][: max(int(objective.cov_fraction * len(drawn)), 1)]
    drawn[chosen] = True
    return drawn


def draw_order(count: int, seed: int) -> Tensor:
    """Return a permutation of ``0:count`` that depends on nothing else but the seed."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def greatest_covariances(tokens: Compared, objective: ObjectiveFields) -> Tensor:
    """Return the ``max(1, int(cov_fraction K))`` tokens of greatest covariance, bool of shape [K]; of equal ones the
    first.
    """
    chosen = torch.zeros(len(tokens.log_probs), dtype=torch.bool, device=tokens.log_probs.device)
    order = covariances(tokens).argsort(descending=True, stable=True)
    chosen[order[: max(int(objective.cov_fraction * len(chosen)), 1)]] = True
    return chosen


def high_entropy(entropy_K: Tensor | None, objective: ObjectiveFields) -> Tensor:
    """Return the tokens whose entropy is at least the quantile ``1 - top_entropy_quantile``, bool of shape [K].

    Source: arXiv 2506.01939, eq. 6; TRL 1.16 ``GRPOTrainer.get_high_entropy_mask``.
    """
    if entropy_K is None:
        raise InputError(
            "entropy_K is missing: top_entropy_quantile needs it; provide it or set top_entropy_quantile=1."
        )
    entropy_K = entropy_K.detach()
    if not len(entropy_K):
        return torch.zeros(0, dtype=torch.bool, device=entropy_K.device)
    return entropy_K >= torch.quantile(entropy_K, 1.0 - objective.top_entropy_quantile)
