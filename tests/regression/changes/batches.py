"""Changes of advantages, weights, masks and the order of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regress.engine import grpo_trainer
from regress.engine.grpo_trainer import Trainer
from regress.engine.mini_batch import TokenBatch
from regress.grpo import advantage_estimators
from regress.replay.fault_injection import Patch
from tests.regression.changes.change import Change


def baseline_of_the_batch(patch: Patch) -> None:
    right: Any = advantage_estimators.group_statistics

    def wrong(rewards: Tensor, groups: Tensor, ddof: int) -> Any:
        found = right(rewards, groups, ddof)
        return replace(found, mean=torch.full_like(found.mean, float(rewards.mean())))

    patch.setattr(advantage_estimators, "group_statistics", wrong)


def advantages_shuffled(patch: Patch) -> None:
    right: Any = grpo_trainer.token_advantages

    def wrong(rewards: Tensor, *args: Any) -> Any:
        return right(rewards.flip(0), *args)

    patch.setattr(grpo_trainer, "token_advantages", wrong)


def advantages_capped(patch: Patch) -> None:
    right: Any = grpo_trainer.token_advantages
    patch.setattr(grpo_trainer, "token_advantages", lambda *args: right(*args).clamp(-0.5, 0.5))


def rewards_in_bfloat16(patch: Patch) -> None:
    right: Any = grpo_trainer.token_advantages
    patch.setattr(
        grpo_trainer,
        "token_advantages",
        lambda rewards, *args: right(rewards.bfloat16().to(rewards.dtype), *args),
    )


def token_mean_for_sample_mean(patch: Patch) -> None:
    right: Any = grpo_trainer.weigh
    patch.setattr(
        grpo_trainer, "weigh", lambda t, p, o, **r: right(t, p, replace(o, aggregation="token-mean"), **r)
    )


def weights_of_a_sum(patch: Patch) -> None:
    right: Any = grpo_trainer.weigh
    patch.setattr(grpo_trainer, "weigh", lambda *args, **rest: torch.ones_like(right(*args, **rest)))


def first_token_unmasked(patch: Patch) -> None:
    """The loss mask begins one token too late."""

    def wrong(_: Trainer, samples: Sequence[Any]) -> list[list[int]]:
        return [[0, *t.loss_mask[:-1]] for t in samples]

    patch.setattr(Trainer, "loss_masks", wrong)


def samples_rotated(patch: Patch) -> None:
    """Old log-probs are those of the next sample of the batch."""
    right: Any = TokenBatch.sampler_log_probs

    def wrong(self: TokenBatch, dtype: torch.dtype) -> Any:
        found = right(self, dtype)
        return None if found is None else found.roll(3)

    patch.setattr(TokenBatch, "sampler_log_probs", wrong)


CHANGES = (
    Change(baseline_of_the_batch, "dense", ("advantage-groups", "advantage-offset")),
    Change(advantages_shuffled, "dense", ("order-not-restored", "advantage-groups")),
    Change(advantages_capped, "dense", ("advantage-groups",)),
    Change(rewards_in_bfloat16, "dense", ("advantage-dtype", "advantage-epsilon")),
    Change(token_mean_for_sample_mean, "dense", ("weights-denominator", "mean-of-means")),
    Change(weights_of_a_sum, "dense", ("weights-denominator",)),
    Change(first_token_unmasked, "dense", ("mask-shifted", "loss-mask", "last-token-masked")),
    Change(samples_rotated, "dense", ("order-not-restored", "old-log-probs")),
)
