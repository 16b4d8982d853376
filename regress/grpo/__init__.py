"""GRPO and its relatives as pure functions of flat tensors over the ``K`` loss tokens.

Names below load on first use, so that configuration and ``--help`` start no torch.
"""

from typing import TYPE_CHECKING

from regress.lazy_imports import lazy_names

if TYPE_CHECKING:
    from regress.grpo.advantages import token_advantages as token_advantages
    from regress.grpo.aggregation import token_weights as token_weights
    from regress.grpo.kl import kl_estimate as kl_estimate
    from regress.grpo.kl import kl_penalty as kl_penalty
    from regress.grpo.logprobs import TokenLogProbs as TokenLogProbs
    from regress.grpo.logprobs import token_log_probs as token_log_probs
    from regress.grpo.losses import TokenLoss as TokenLoss
    from regress.grpo.losses import token_loss as token_loss
    from regress.grpo.metrics import token_metrics as token_metrics
    from regress.grpo.objective import Objective as Objective
    from regress.grpo.presets import make_objective as make_objective
    from regress.grpo.ratios import importance_ratio as importance_ratio
    from regress.grpo.ratios import sampler_weights as sampler_weights

_HOMES = {
    "Objective": "objective",
    "TokenLogProbs": "logprobs",
    "TokenLoss": "losses",
    "importance_ratio": "ratios",
    "kl_estimate": "kl",
    "kl_penalty": "kl",
    "make_objective": "presets",
    "sampler_weights": "ratios",
    "token_advantages": "advantages",
    "token_log_probs": "logprobs",
    "token_loss": "losses",
    "token_metrics": "metrics",
    "token_weights": "aggregation",
}
__all__ = sorted(_HOMES)

if not TYPE_CHECKING:  # to a type checker a module with `__getattr__` has every name
    __getattr__ = lazy_names(__name__, _HOMES)
