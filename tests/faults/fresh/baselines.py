"""Faults of what a reward is compared with: the group, the order of samples, the divergence that is taken off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from regress.dump.trajectory import Trajectory
from regress.engine import trainer
from regress.engine.batch import LossTokens
from regress.engine.rewards import sample_kl
from regress.engine.trainer import Trainer
from regress.grpo import advantages
from regress.grpo.advantages import token_advantages
from regress.grpo.segments import segment_lengths, segment_sum
from tests.faults.fault import fault
from tests.faults.patch import Patch

ADVANTAGES = "advantages advantages"


@fault(
    category="I",
    fresh=True,
    source="a filter of truncated completions before the statistics of their group",
    cases=("on_policy",),
    variants=("base",),
    first=ADVANTAGES,
    rules=(
        "advantage-offset",
        "advantage-groups",
        "advantage-scale",
        "advantage-zero",
    ),  # the last one names a filter, after which no group of the first step has a spread
)
def truncated_completions_leave_their_group(patch: Patch) -> None:
    """Mean and deviation of a group are those of its completions that ended by themselves."""
    right: Any = token_advantages
    of_trainer: Any = Trainer._advantages
    cut: list[bool] = []

    def noted(self: Trainer, samples: Sequence[Trajectory], *rest: Any) -> Tensor:
        cut[:] = [sample.finish_reason == "length" for sample in samples]
        return of_trainer(self, samples, *rest)

    def wrong(rewards: Tensor, groups: Tensor, *args: Any, **rest: Any) -> Tensor:
        alone = torch.arange(len(groups)) + int(groups.max()) + 1
        return right(rewards, torch.where(torch.tensor(cut), alone, groups), *args, **rest)

    patch.setattr(Trainer, "_advantages", noted)
    patch.setattr(trainer, "token_advantages", wrong)


@fault(
    category="I",
    fresh=True,
    source="verl#2185: rewards gathered rank by rank of samples that were dealt out",
    cases=("dapo",),
    variants=("dp3-dealt",),
    first="advantages",
    ranks=(0, 1, 2),
    rules=(
        "order-not-restored",
        "advantage-groups",
        "advantage-offset",
        "advantage-scale",
    ),  # groups are those of other samples' rewards, and so are their means and deviations
)
def rewards_in_the_order_of_ranks(patch: Patch) -> None:
    """Rewards of the first rank's samples stand first, then those of the second: groups get others' rewards."""
    right: Any = token_advantages

    def wrong(rewards: Tensor, *args: Any, **rest: Any) -> Tensor:
        ranks = dist.get_world_size()
        order = torch.cat([torch.arange(rank, len(rewards), ranks) for rank in range(ranks)])
        return right(rewards[order], *args, **rest)

    patch.setattr(trainer, "token_advantages", wrong)


@fault(
    category="J",
    fresh=True,
    source="a masked mean of the KL in the reward of a sample, in place of its sum",
    cases=("rloo",),
    variants=("base",),
    first=ADVANTAGES,
    rules=("advantage-penalty",),
)
def penalty_averaged_over_tokens(patch: Patch) -> None:
    """The mean KL of a sample's tokens is taken off its reward, not their sum."""
    right: Any = segment_sum

    def wrong(values: Tensor, sequence: Tensor, count: int) -> Tensor:
        return right(values, sequence, count) / segment_lengths(sequence, count).clamp(min=1)

    patch.setattr(advantages, "segment_sum", wrong)


@fault(
    category="J",
    fresh=True,
    source="a controller that each rank feeds with its own batch",
    cases=("cispo_kl",),
    variants=("dp2",),
    first="advantages",
    ranks=(0, 1),
    steps=None,
    rules=("advantage-penalty",),  # names the coefficient
)
def controller_fed_by_own_samples(patch: Patch) -> None:
    """Each rank adapts the coefficient of the KL by its own samples, and the next rewards have two of them."""
    right: Any = sample_kl

    def wrong(batches: Sequence[LossTokens], *rest: Any) -> tuple[float, int]:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        own = []
        for tokens in batches:
            size = -(-tokens.num_sequences // ranks)
            start, stop = rank * size, min((rank + 1) * size, tokens.num_sequences)
            index = torch.nonzero((tokens.sequence >= start) & (tokens.sequence < stop))[:, 0]
            own.append(tokens.select(index, tokens.sequence[index] - start, stop - start))
        return right(own, *rest)

    patch.setattr(trainer, "sample_kl", wrong)
