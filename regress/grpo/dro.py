"""Direct reward optimisation (DRO): a token loss with a quadratic penalty in place of a clipped ratio."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from regress.grpo.losses import TokenLoss, token_loss
from regress.grpo.objective import Objective


def dro_loss(beta: float) -> Callable[..., TokenLoss]:
    """Return the loss ``-(A log p - beta / 2 (log p - log p_old)^2)`` of a token, with the signature of `token_loss`.

    The objective's own loss must be ``reinforce``, to which the penalty is added; gradients flow through both terms.
    Source: verl's ``dro`` policy loss (Richemond et al., arXiv 2405.19107, token by token).
    """

    def loss(
        log_probs_K: Tensor,
        old_log_probs_K: Tensor,
        advantages_K: Tensor,
        sequence_K: Tensor,
        num_sequences: int,
        objective: Objective,
        **rest: Any,
    ) -> TokenLoss:
        plain = token_loss(
            log_probs_K, old_log_probs_K, advantages_K, sequence_K, num_sequences, objective, **rest
        )
        penalty_K = beta / 2 * (log_probs_K - old_log_probs_K).square()
        return replace(plain, loss_K=plain.loss_K + penalty_K, policy_K=plain.policy_K + penalty_K.detach())

    return loss
