"""Marks that a loss gets by comparing the loss tokens of a mini-batch: over all microbatches and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regress.dump.taps import receiving
from regress.engine.engine_ranks import Ranks
from regress.engine.mini_batch import LossTokens, Microbatch
from regress.engine.policy_interface import Policy
from regress.errors import ReplayError
from regress.grpo.importance_ratios import sampler_weights
from regress.grpo.loss_aggregation import entropy_weights
from regress.grpo.objective import Objective
from regress.grpo.sampler_corrections import accepted
from regress.grpo.token_samples import Samples
from regress.grpo.token_selection import Compared, marks_of, normalized_weights


def compared(
    policy: Policy, tokens: LossTokens, microbatches: Sequence[Microbatch], objective: Objective, world: Ranks
) -> LossTokens:
    """Return the loss tokens with the marks that the objective's comparisons give them, by all ranks together.

    The policy as it is before the update runs forward once more, because a comparison over the mini-batch needs the
    log-probs of all of it. Tokens of an objective that compares none, or only within microbatches, are unchanged.
    """
    if not objective.compares_tokens or objective.statistics_scope == "microbatch":
        return tokens
    assert tokens.advantages is not None
    log_probs, entropy = _values(policy, tokens, microbatches, objective, world)
    old = log_probs if tokens.old_log_probs is None else tokens.old_log_probs
    samples = Samples(tokens.sequence, tokens.num_sequences)
    these = Compared(log_probs, old, tokens.advantages, samples, entropy, tokens.sampler_log_probs)
    marks = marks_of(these, objective)
    changes: dict[str, Any] = {"kept": marks.kept_K, "penalized": marks.penalized_K}
    if objective.top_entropy_quantile < 1.0 and tokens.entropy_weights is not None:
        whole = tokens.sequence, tokens.num_sequences, objective
        changes["entropy_weights"] = entropy_weights(*whole, partition=(), kept_K=marks.kept_K)
    if objective.correction_normalize and tokens.correction is None:
        changes["correction"] = normalized_weights(these, objective)
    return replace(tokens, **changes)


def _values(
    policy: Policy, tokens: LossTokens, microbatches: Sequence[Microbatch], objective: Objective, world: Ranks
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs and, if they are compared, entropies of all loss tokens, [K] each."""
    by_entropy = objective.top_entropy_quantile < 1.0
    with receiving(None):  # activations are those of the pass that is trained
        found = policy.values(microbatches, entropy=by_entropy)
    log_probs = _collected([each.log_probs for each in found], microbatches, tokens, world)
    if not by_entropy:
        return log_probs, None
    entropies = [torch.zeros_like(each.log_probs) if each.entropy is None else each.entropy for each in found]
    return log_probs, _collected(entropies, microbatches, tokens, world)


def _collected(
    values: Sequence[Tensor], microbatches: Sequence[Microbatch], tokens: LossTokens, world: Ranks
) -> Tensor:
    out = torch.zeros(len(tokens), dtype=values[0].dtype, device=values[0].device)
    for micro, own in zip(microbatches, values, strict=True):
        out[micro.select] = own
    return world.sum(out)


def rollout_weights(batches: Sequence[LossTokens], objective: Objective) -> list[LossTokens]:
    """Return the loss tokens of a rollout with the sampler weights that are computed over it, if there are any."""
    if not objective.corrects_over_rollout or any(tokens.old_log_probs is None for tokens in batches):
        return list(batches)
    old, sampler = (
        torch.cat([_given(tokens, name) for tokens in batches])
        for name in ("old_log_probs", "sampler_log_probs")
    )
    counts = torch.tensor([0, *(tokens.num_sequences for tokens in batches)]).cumsum(0)
    sequence = torch.cat(
        [tokens.sequence + int(start) for tokens, start in zip(batches, counts, strict=False)]
    )
    weights = sampler_weights(old, sampler, sequence, int(counts[-1]), objective)
    parts = weights.split([len(tokens) for tokens in batches])
    return [replace(tokens, correction=own) for tokens, own in zip(batches, parts, strict=True)]


def kept_by_rejection(tokens: LossTokens, objective: Objective) -> Tensor | None:
    """Return which loss tokens rejection keeps before the first update, bool of shape [K]; None without it."""
    if objective.rejection is None or objective.correction_policy == "current":
        return None
    old, sampler = _given(tokens, "old_log_probs"), _given(tokens, "sampler_log_probs")
    return accepted(old, sampler, Samples(tokens.sequence, tokens.num_sequences), objective)


def _given(tokens: LossTokens, name: str) -> Tensor:
    values: Tensor | None = getattr(tokens, name)
    if values is None:
        raise ReplayError(f"""algorithm.sampler_correction and algorithm.rejection need {name}, but some of the
        trajectories have none; set algorithm.sampler_correction=none and algorithm.rejection=null""")
    return values


def recorded_by_sampler(log_probs: Tensor | None) -> Tensor:
    """Return the sampler's log-probs; `ReplayError` if some of the trajectories have none."""
    if log_probs is None:
        raise ReplayError("""algorithm.old_log_probs=sampler needs the sampler's log-probs, but some of the trajectories
        have none; set algorithm.old_log_probs=recompute""")
    return log_probs
