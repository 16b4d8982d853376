"""Faults in the model's inputs, and in the weights of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from regress.engine import policy, trainer
from regress.engine.attention import VarlenSegments
from regress.engine.batch import LossTokens, Microbatch, TokenBatch
from regress.engine.policy import LocalPolicy
from regress.engine.step import weigh
from regress.engine.trainer import Trainer
from regress.faults.patch import Patch
from regress.grpo import estimators
from regress.grpo.advantages import token_advantages
from regress.grpo.groups import group_statistics
from regress.grpo.objective import Objective
from regress.layout import RankLayout, TokenLayout

# inputs of the model


def columns_as_positions(patch: Patch) -> None:
    """Position ids count through the row, samples and padding alike, in the batch that is recorded."""
    project = TokenBatch._project

    def wrong(self: TokenBatch, place: RankLayout, *args: Any) -> Microbatch:
        micro = project(self, place, *args)
        layout = place.tokens
        columns = torch.arange(layout.shape[1]).expand(layout.shape)
        return replace(micro, position_ids=torch.where(torch.from_numpy(layout.attention_mask), columns, 0))

    patch.setattr(TokenBatch, "_project", wrong)


def positions_ignored(patch: Patch) -> None:
    """Position ids count through the row, but only in the model: the recorded batch is right."""
    run = LocalPolicy._run

    def wrong(self: LocalPolicy, model: PreTrainedModel, micro: Microbatch, *rest: Any) -> Tensor:
        columns = torch.arange(micro.layout.shape[1]).expand(micro.layout.shape)
        return run(self, model, replace(micro, position_ids=columns), *rest)

    patch.setattr(LocalPolicy, "_run", wrong)


def causal_only(patch: Patch) -> None:
    """The attention mask is the causal one alone."""

    def wrong(layout: TokenLayout, implementation: str, *_: Any) -> Tensor:
        assert implementation == "sdpa"
        rows, columns = layout.shape
        return torch.ones(rows, 1, columns, columns, dtype=torch.bool).tril()

    patch.setattr(policy, "block_causal_mask", wrong)


def one_segment(patch: Patch) -> None:
    """``cu_seqlens`` is dropped: a packed row is one sequence."""
    of = VarlenSegments.of

    def wrong(layout: TokenLayout, local_index: Tensor) -> VarlenSegments:
        right = of(layout, local_index)
        return VarlenSegments(right.index, (sum(right.lengths),))

    patch.setattr(VarlenSegments, "of", wrong)


def tool_tokens_in_the_loss(patch: Patch) -> None:
    """Everything after the prompt is trained on."""
    patch.setattr(
        Trainer,
        "loss_masks",
        lambda _, samples: [[0] * t.prompt_length + [1] * (len(t.tokens) - t.prompt_length) for t in samples],
    )


# rewards to advantages, weights


def population_deviation(patch: Patch) -> None:
    """The deviation divides by N in place of N - 1."""
    statistics: Any = group_statistics
    patch.setattr(
        estimators, "group_statistics", lambda rewards, groups, ddof: statistics(rewards, groups, 0)
    )


def groups_interleaved(patch: Patch) -> None:
    """Samples of one group lie together, but are grouped as if the groups were interleaved."""
    right: Any = token_advantages

    def wrong(rewards: Tensor, groups: Tensor, *args: Any) -> Any:
        return right(rewards, torch.arange(len(groups)) % len(groups.unique()), *args)

    patch.setattr(trainer, "token_advantages", wrong)


def mean_of_means(patch: Patch) -> None:
    """The loss is the mean of each microbatch's mean."""
    right: Any = weigh

    def wrong(tokens: LossTokens, parts: Sequence[Any], objective: Objective, **rest: Any) -> Any:
        return right(tokens, parts, replace(objective, denominator_scope="microbatch"), **rest)

    patch.setattr(trainer, "weigh", wrong)


def order_not_restored(patch: Patch) -> None:
    """Values of reordered microbatches are laid end to end instead of back in their places."""

    def wrong(self: Trainer, source: LocalPolicy, micros: Sequence[Microbatch], count: int) -> Tensor:
        return torch.cat(source.log_probs(micros))

    patch.setattr(Trainer, "_collected", wrong)


def deviation_epsilon(patch: Patch) -> None:
    """The deviation that divides an advantage has 1e-4 added to its epsilon."""
    right: Any = token_advantages

    def wrong(rewards: Tensor, groups: Tensor, sequence: Tensor, objective: Objective, *rest: Any) -> Any:
        return right(rewards, groups, sequence, replace(objective, eps=objective.eps + 1e-4), *rest)

    patch.setattr(trainer, "token_advantages", wrong)


def last_token_not_counted(patch: Patch) -> None:
    """The denominator is one token short."""
    right: Any = weigh

    def wrong(*args: Any, **rest: Any) -> Any:
        weights = right(*args, **rest)
        return weights * (len(weights) / (len(weights) - 1))

    patch.setattr(trainer, "weigh", wrong)
