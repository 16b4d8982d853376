"""Losses of the wires: which objective one of them is, and which need the custom loss.

The wires' losses are sums over tokens. Aggregation, denominators and the sampler's correction are factors of a token,
so they go into its advantage: all of these losses are linear in it, ppo as long as the factor is not negative.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from regress.engine.batch import LossTokens
from regress.errors import ConfigError
from regress.grpo.objective import Objective
from regress.grpo.ratios import sampler_weights
from regress.grpo.segments import alone

CLIPPED = {"ppo_clip": "ppo", "cispo": "cispo"}


@dataclass(frozen=True)
class WireLoss:
    """Loss that the wires name, and its settings."""

    name: str
    config: dict[str, float] = field(default_factory=dict)


def wire_loss(objective: Objective, *, own_loss: bool) -> WireLoss | None:
    """Return the wires' loss that an objective is, but for the factors of its tokens; None if there is none.

    Args:
        own_loss: True if ``algorithm.loss_function`` computes the loss.
    """
    beyond = (
        own_loss
        or objective.kl_in_loss
        or objective.importance_level != "token"
        or objective.delta is not None
        or objective.dual_clip is not None
        or objective.log_ratio_min is not None
        or objective.log_ratio_max is not None
        or objective.loss not in ("importance_sampling", "reinforce", *CLIPPED)
        or objective.compares_tokens
        or objective.off_policy_threshold is not None
        or objective.correction_policy == "current"
        or (objective.old_log_probs == "current" and objective.loss != "reinforce")
    )
    if beyond:
        return None
    if objective.loss == "importance_sampling":
        return WireLoss("importance_sampling")
    if objective.loss == "reinforce":
        return WireLoss("cross_entropy")
    low, high = objective.clip_range
    return WireLoss(CLIPPED[objective.loss], {"clip_low_threshold": low, "clip_high_threshold": high})


def datum_values(part: LossTokens, objective: Objective) -> dict[str, Tensor]:
    """Return the ``[K]`` values that the datums of loss tokens hold: advantages times every factor, and old log-probs.

    The product is rounded once, to float32.
    """
    assert part.weights is not None
    assert part.advantages is not None
    factor = part.weights.double() * part.advantages.double()
    old, sampler = part.old_log_probs, part.sampler_log_probs
    if part.correction is not None:
        factor = factor * part.correction.double()
    elif objective.sampler_correction != "none" and old is not None and sampler is not None:
        factor = (
            factor
            * sampler_weights(old, sampler, part.sequence, part.num_sequences, objective, alone).double()
        )
    return {"advantages": factor.float()} | ({} if old is None else {"logprobs": old})


def entropy_coefficient(objective: Objective, weights: Tensor, wire: str) -> float | None:
    """Return the coefficient of each token's entropy in a sum over tokens; None without an entropy term.

    Args:
        weights: ``[K]`` factors of the tokens, which have to be one number.

    Raises:
        ConfigError: if the wire cannot carry the term.
    """
    if objective.entropy_coef == 0.0:
        return None
    stated = f"algorithm.entropy_coef={objective.entropy_coef:g}"
    if wire != "weaver":
        raise ConfigError(
            f"{stated} has no place in Tinker's protocol, whose losses are functions of log-probs alone; set "
            "algorithm.entropy_coef=0 or service.train_service.backend=weaver"
        )
    if len(weights) and float(weights.min()) != float(weights.max()):
        raise ConfigError(
            f"{stated} with algorithm.aggregation={objective.aggregation} weighs the entropies of tokens differently, "
            "and Weaver's protocol has one entropy_coeff for all; set algorithm.aggregation=token-mean or "
            "algorithm.entropy_coef=0"
        )
    return objective.entropy_coef * float(weights[0]) if len(weights) else objective.entropy_coef
