"""Faults of the way back: what is detached, left out or scaled of the gradient, and of moments made of parts of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from regress.engine.build import Run
from regress.engine.policy import LocalPolicy
from regress.grpo import losses
from regress.grpo.losses import TokenLoss
from tests.faults.fault import fault
from tests.faults.optimizer import EMBEDDING, around_the_update
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import EMBEDDED


@fault(
    category="J",
    fresh=True,
    source="TRL PR#4638: a divergence that is corrected by a weight without gradient",
    cases=("trl",),
    variants=("base",),
    first="token_gradient token_gradient",
    # token-gradient: names a term that is detached
    rules=("kl-gradient", "kl-gradient-estimator", "token-gradient", "inputs-hold"),
)
def ratio_of_the_divergence_detached(patch: Patch) -> None:
    """The ratio that corrects the divergence is a weight without a gradient, and should have its own."""
    right: Any = losses._kl

    def wrong(log_probs: Tensor, reference: Tensor | None, ratio: Tensor, objective: Any) -> Tensor:
        found: Tensor = right(log_probs, reference, ratio.detach(), objective)
        return found

    patch.setattr(losses, "_kl", wrong)


@fault(
    category="R",
    fresh=True,
    source="a trainer that spares the backward pass of tokens without advantage",
    variants=("packed-shortest-first",),
    first="token_gradient token_gradient",
    rules=(
        "token-gradient",  # names a mask of the backward pass
        "token-gradient-scale",  # by 0, where it is off
        "kl-gradient",  # the divergence is all that these tokens have
        "samples-in-the-gradient",
        "inputs-hold",
    ),
)
def tokens_without_advantage_not_sent_back(patch: Patch) -> None:
    """Tokens whose advantage is 0 have no gradient, though their divergence is a part of the loss."""
    right: Any = losses._token_loss

    def wrong(log_probs: Tensor, given: Any, *rest: Any) -> TokenLoss:
        found: TokenLoss = right(log_probs, given, *rest)
        loss = torch.where(given.advantages == 0, found.loss_K.detach(), found.loss_K)
        return replace(found, loss_K=loss)

    patch.setattr(losses, "_token_loss", wrong)


@fault(
    category="R",
    fresh=True,
    source="torch: Embedding(scale_grad_by_freq=True)",
    variants=("reversed",),
    first=f"gradient {EMBEDDING}",
    names=EMBEDDED,
    rules=(
        "gradient-of-one-tensor",  # names a scale on it
        "backward-of-a-module",
        "gradients",
        "inputs-hold",
    ),
)
def embeddings_scaled_by_their_frequency(run: Run) -> None:
    """The gradient of an embedding is divided by how often its token is in the microbatch."""
    embedding: Any = run.trainer.policy.model.get_input_embeddings()
    embedding.scale_grad_by_freq = True


@fault(
    category="M",
    fresh=True,
    source="a second moment that is fed behind each microbatch",
    first=f"optimizer {EMBEDDING}/exp_avg_sq",
    names=r".*/exp_avg_sq",
    # the first one names what is done to the gradient that enters the moments
    rules=("state-of-a-rank-unclipped", "inputs-hold"),
)
def second_moment_of_microbatches(patch: Patch) -> None:
    """The second moment takes the squares of the gradients of microbatches, summed, not the square of their sum."""
    right: Any = LocalPolicy._backward
    squares: dict[Tensor, Tensor] = {}

    def noted(self: LocalPolicy, share: Tensor) -> None:
        found = [parameter for _, parameter in self.named_parameters()]
        before = [None if one.grad is None else one.grad.clone() for one in found]
        right(self, share)
        for one, known in zip(found, before, strict=True):
            assert one.grad is not None
            own = (one.grad if known is None else one.grad - known).square()
            squares[one] = own if one not in squares else squares[one] + own

    @torch.no_grad()
    def wrong(optimizer: Optimizer, update: Callable[[], None]) -> None:
        for group in optimizer.param_groups:
            beta = group["betas"][1]
            for parameter in group["params"]:  # so that the update makes the wrong moment, and uses it
                surplus = squares[parameter] - parameter.grad.square()
                optimizer.state[parameter]["exp_avg_sq"].add_(surplus * ((1.0 - beta) / beta))
        squares.clear()
        update()

    patch.setattr(LocalPolicy, "_backward", noted)
    around_the_update(patch, wrong)
