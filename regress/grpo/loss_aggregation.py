"""Weights that turn token losses into one number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regress.grpo.argument_checks import InputError, check_sequences
from regress.grpo.fields import ObjectiveFields
from regress.grpo.objective_catalogue import AGGREGATIONS
from regress.grpo.objective_checks import check_choice
from regress.grpo.segment_sums import segment_lengths


def token_weights(
    sequence_K: Tensor, num_sequences: int, objective: ObjectiveFields, *, max_completion_length: int
) -> Tensor:
    """Return the weight of each loss token in ``loss = sum(weights_K * loss_K)``; float64, shape [K].

    Called once over a whole mini-batch (``denominator_scope="global"``), so that microbatches and ranks only
    add up their shares; or once per microbatch, divided by their number (``"microbatch"``).

    Args:
        num_sequences: samples in the batch, those without loss tokens included.
        max_completion_length: divisor of ``seq-mean-token-sum-norm``, unless the objective sets
            ``norm_length``; with ``norm_rule="longest"`` that of the longest completion of a microbatch.

    Sources, with n tokens in a sample, K tokens and N samples in all (or only those with tokens, if
    ``count_empty_rows`` is off): token-mean 1/K (DAPO, arXiv 2503.14476, eq. 8); seq-mean-token-mean 1/(N n)
    (GRPO, arXiv 2402.03300, eq. 3); seq-mean-token-sum 1/N; seq-mean-token-sum-norm 1/(N length)
    (Dr. GRPO, arXiv 2503.20783); token-sum 1. The names are verl's.
    """
    check_choice("aggregation", objective.aggregation, AGGREGATIONS)
    check_sequences(sequence_K, num_sequences)
    weights_K = torch.ones(sequence_K.numel(), dtype=torch.float64, device=sequence_K.device)
    if objective.aggregation == "token-sum":
        return weights_K
    if objective.aggregation == "token-mean":
        return weights_K / max(sequence_K.numel(), 1)
    lengths = segment_lengths(sequence_K, num_sequences)
    counted = num_sequences if objective.count_empty_rows else int((lengths > 0).sum())
    weights_K = weights_K / max(counted, 1)
    if objective.aggregation == "seq-mean-token-mean":
        return weights_K / lengths[sequence_K]
    if objective.aggregation == "seq-mean-token-sum-norm":
        return weights_K / _norm_length(objective, max_completion_length)
    return weights_K


def _norm_length(objective: ObjectiveFields, max_completion_length: int) -> int:
    length = max_completion_length if objective.norm_length is None else objective.norm_length
    if length < 1:
        raise InputError(f"length {length} cannot divide a loss: set norm_length to at least 1.")
    return length


def batch_weights(
    sequence_K: Tensor,
    num_sequences: int,
    objective: ObjectiveFields,
    *,
    max_completion_length: int,
    partition: Sequence[Sequence[int]],
    ranks: int = 1,
    completion_lengths: Sequence[int] | None = None,
) -> Tensor:
    """Return the weight of each loss token of a mini-batch that is cut into microbatches; float64, shape [K].

    Args:
        max_completion_length: as for `token_weights`.
        partition: samples of each microbatch, of all ranks.
        ranks: ranks that hold different samples, of which ``microbatch_sum`` is the mean.
        completion_lengths: tokens of each sample's completion, tools' answers included, for ``norm_rule="longest"``.
    """
    parts = [list(members) for members in partition if members]
    if objective.denominator_scope == "global":
        weights_K = token_weights(
            sequence_K, num_sequences, _unnormed(objective), max_completion_length=max_completion_length
        )
        if objective.norm_rule == "longest":
            weights_K = weights_K / _longest(sequence_K, num_sequences, parts, completion_lengths)
        return weights_K
    weights_K = torch.zeros(len(sequence_K), dtype=torch.float64, device=sequence_K.device)
    count = len(parts) if objective.denominator_scope == "microbatch" else ranks
    for members in parts:
        longest = max_completion_length
        if objective.norm_rule == "longest":
            longest = max(_lengths(completion_lengths)[member] for member in members)
        select, own_K = _members(sequence_K, num_sequences, members)
        own = token_weights(own_K, len(members), objective, max_completion_length=longest)
        weights_K[select] = own / count
    return weights_K


def drawn_weights(
    sequence_K: Tensor,
    counts_N: Tensor,
    objective: ObjectiveFields,
    *,
    partition: Sequence[Sequence[int]],
    completion_lengths: Sequence[int] | None = None,
    **rest: Any,
) -> Tensor:
    """Return the `batch_weights` of a batch that holds each sample as often as it was drawn; float64, shape [K].

    The weight of a token is the sum of those of its copies, and 0 where its sample was not drawn.

    Args:
        counts_N: how often each sample was drawn.
    """
    copies = torch.repeat_interleave(torch.arange(len(counts_N), device=counts_N.device), counts_N)
    lengths = segment_lengths(sequence_K, len(counts_N))
    starts = lengths.cumsum(0) - lengths
    own = lengths[copies]
    offsets = torch.repeat_interleave(own.cumsum(0) - own, own)
    tokens = torch.repeat_interleave(starts[copies], own) + torch.arange(len(offsets)) - offsets
    places: list[list[int]] = [[] for _ in range(len(counts_N))]
    for place, sample in enumerate(copies.tolist()):
        places[sample].append(place)
    weights = batch_weights(
        torch.repeat_interleave(torch.arange(len(copies)), own),
        len(copies),
        objective,
        partition=[[place for member in members for place in places[member]] for members in partition],
        completion_lengths=None
        if completion_lengths is None
        else [completion_lengths[sample] for sample in copies.tolist()],
        **rest,
    )
    return torch.zeros(len(sequence_K), dtype=torch.float64).index_add(0, tokens, weights)


def entropy_weights(
    sequence_K: Tensor,
    num_sequences: int,
    objective: ObjectiveFields,
    *,
    partition: Sequence[Sequence[int]],
    kept_K: Tensor | None = None,
) -> Tensor | None:
    """Return the weight of each token's entropy, float64 of shape [K]; None where it is the weight of its loss.

    Args:
        partition: samples of each microbatch, of all ranks.
        kept_K: tokens that the bonus is for, if not all.

    Source: TRL 1.16 ``GRPOTrainer._compute_loss``: the mean over the tokens of a microbatch, whatever ``loss_type``.
    """
    if objective.entropy_aggregation == "loss" or not objective.has_entropy_term:
        return None
    counted_K = torch.ones(len(sequence_K), dtype=torch.float64, device=sequence_K.device)
    if kept_K is not None:
        counted_K = counted_K * kept_K
    if objective.entropy_scope == "global":
        return counted_K / max(float(counted_K.sum()), 1.0)
    weights_K = torch.zeros_like(counted_K)
    parts = [list(members) for members in partition if members]
    for members in parts:
        select, _ = _members(sequence_K, num_sequences, members)
        weights_K[select] = counted_K[select] / max(float(counted_K[select].sum()), 1.0) / len(parts)
    return weights_K


def entropy_scale(weights_K: Tensor, entropy_weights_K: Tensor) -> Tensor:
    """Return what the entropies of tokens are multiplied by, so that the weights of losses weigh them as these weights.

    ``sum(weights * (loss - coef * scale * entropy))`` is then ``sum(weights * loss) - coef * sum(entropy_weights *
    entropy)``; shape [K]. Weights of losses are not 0.
    """
    return entropy_weights_K / weights_K


def _members(sequence_K: Tensor, num_sequences: int, members: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the tokens of some samples, and the number of each token's sample among them."""
    number = torch.full((num_sequences,), -1, dtype=torch.int64, device=sequence_K.device)
    ordered = torch.tensor(sorted(members), dtype=torch.int64, device=sequence_K.device)
    number[ordered] = torch.arange(len(members), device=sequence_K.device)
    own_K = number[sequence_K]
    select = torch.nonzero(own_K >= 0)[:, 0]
    return select, own_K[select]


def _unnormed(objective: ObjectiveFields) -> ObjectiveFields:
    """Return the objective with length 1 where the length of a microbatch divides afterwards."""
    return (
        objective
        if objective.norm_rule == "maximum"
        else replace(objective, norm_rule="maximum", norm_length=1)
    )


def _longest(
    sequence_K: Tensor, num_sequences: int, parts: Sequence[Sequence[int]], lengths: Sequence[int] | None
) -> Tensor:
    """Return the longest completion of each token's microbatch, [K]."""
    found_K = torch.ones(len(sequence_K), dtype=torch.float64, device=sequence_K.device)
    for members in parts:
        select, _ = _members(sequence_K, num_sequences, members)
        found_K[select] = float(max(_lengths(lengths)[member] for member in members))
    return found_K


def _lengths(lengths: Sequence[int] | None) -> Sequence[int]:
    if lengths is None:
        raise InputError(
            "completion_lengths is missing: norm_rule=longest divides by them; give one per sample."
        )
    return lengths
