"""GRPO and its relatives as pure functions of flat tensors over the ``K`` loss tokens.

Names below load on first use, so that configuration and ``--help`` start no torch.
"""

from typing import TYPE_CHECKING

from regress.lazy_imports import lazy_names

if TYPE_CHECKING:
    from regress.grpo.advantage_computation import token_advantages as token_advantages
    from regress.grpo.importance_ratios import importance_ratio as importance_ratio
    from regress.grpo.importance_ratios import sampler_weights as sampler_weights
    from regress.grpo.kl_divergence import kl_estimate as kl_estimate
    from regress.grpo.kl_divergence import kl_penalty as kl_penalty
    from regress.grpo.loss_aggregation import token_weights as token_weights
    from regress.grpo.objective import Objective as Objective
    from regress.grpo.objective_presets import make_objective as make_objective
    from regress.grpo.selective_log_softmax import TokenLogProbs as TokenLogProbs
    from regress.grpo.selective_log_softmax import token_log_probs as token_log_probs
    from regress.grpo.token_losses import TokenLoss as TokenLoss
    from regress.grpo.token_losses import token_loss as token_loss
    from regress.grpo.update_metrics import token_metrics as token_metrics

_HOMES = {
    "Objective": "objective",
    "TokenLogProbs": "selective_log_softmax",
    "TokenLoss": "token_losses",
    "importance_ratio": "importance_ratios",
    "kl_estimate": "kl_divergence",
    "kl_penalty": "kl_divergence",
    "make_objective": "objective_presets",
    "sampler_weights": "importance_ratios",
    "token_advantages": "advantage_computation",
    "token_log_probs": "selective_log_softmax",
    "token_loss": "token_losses",
    "token_metrics": "update_metrics",
    "token_weights": "loss_aggregation",
}
__all__ = sorted(_HOMES)

if not TYPE_CHECKING:  # to a type checker a module with `__getattr__` has every name
    __getattr__ = lazy_names(__name__, _HOMES)
