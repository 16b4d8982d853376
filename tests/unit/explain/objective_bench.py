"""Losses and advantages of an objective of our own, for a trainer that explanations are made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from trainer_bench import LONGEST, Batch, Loss, World

from regress.grpo.advantage_computation import token_advantages
from regress.grpo.loss_aggregation import batch_weights
from regress.grpo.objective import Objective
from regress.grpo.token_losses import token_loss


def preset(objective: Objective) -> Loss:
    """The loss that an objective says."""

    def loss(world: World, batch: Batch, facts: dict[str, Any]) -> Tensor:
        keep = batch.mask.bool()
        sequence = torch.nonzero(keep)[:, 0]
        whole = torch.nonzero(world.mask)[:, 0]
        mine = torch.isin(whole, torch.tensor(batch.samples))
        shares = batch_weights(
            whole,
            len(world.mask),
            objective,
            max_completion_length=LONGEST,
            partition=[samples for _, _, samples in world.blocks],
            ranks=world.run.ranks,
            completion_lengths=[len(t.tokens) - t.prompt_length for t in world.trajectories],
        )[mine]
        terms = token_loss(
            batch.log_probs[keep],
            batch.old[keep],
            objective_advantages(world, objective)[mine],
            sequence,
            len(batch.samples),
            objective,
            ref_log_probs_K=batch.ref[keep],
            sampler_log_probs_K=batch.old[keep],
            entropy_K=batch.entropies[keep],
        )
        return (shares.to(terms.loss_K.dtype) * terms.loss_K).sum() * world.run.ranks

    return loss


def objective_advantages(world: World, objective: Objective) -> Tensor:
    """Advantages of all loss tokens of the rollouts, ``[K]``, from all that an estimator may ask for."""
    keep = world.mask.bool()
    log_probs, squares = world.before()
    prompts = torch.tensor([t.prompt_length for t in world.trajectories])
    whole, position = torch.nonzero(world.mask).unbind(1)
    return token_advantages(
        world.rewards,
        world.groups,
        whole,
        objective,
        baselines_N=world.greedy,
        values_K=world.critic[keep],
        old_log_probs_K=log_probs[keep],
        sum_pi_squared_K=squares[keep],
        position_K=position - prompts[whole],
    )
