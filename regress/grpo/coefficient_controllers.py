"""Coefficients that follow what they weigh. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from regress.grpo.fields import ObjectiveFields

CLIP = 0.2
"""Greatest relative error that one step of the KL controller answers to."""


def adapted_kl_coef(coefficient: float, kl: float, samples: int, objective: ObjectiveFields) -> float:
    """Return the coefficient after a rollout: ``c (1 + clip(KL / target - 1, -0.2, 0.2) samples / horizon)``.

    Args:
        kl: mean over samples of the mean KL of their tokens, before the update.

    Source: arXiv 1909.08593, section 2.2; verl 0.9 ``AdaptiveKLController``.
    """
    error = min(max(kl / objective.kl_target - 1.0, -CLIP), CLIP)
    return coefficient * (1.0 + error * samples / objective.kl_horizon)


def adapted_entropy_coef(coefficient: float, entropy: float, objective: ObjectiveFields) -> float:
    """Return the coefficient after an update: up by the step at or below the target, down above it, within bounds.

    Args:
        entropy: mean over the tokens that the bonus is for, in nats.

    Source: Skywork-OR1, arXiv 2505.22312; TRL 1.16 ``use_adaptive_entropy``.
    """
    if entropy <= objective.entropy_target:
        return min(coefficient + objective.entropy_coef_delta, objective.entropy_coef_max)
    return max(coefficient - objective.entropy_coef_delta, objective.entropy_coef_min)


@dataclass
class Coefficients:
    """Coefficients in use, and the mean entropy of the last update.

    Attributes:
        kl, entropy: coefficients of the next rollout and update.
        last_entropy: mean entropy of the last update; infinite before the first.
    """

    objective: ObjectiveFields
    kl: float = 0.0
    entropy: float = 0.0
    last_entropy: float = float("inf")

    @classmethod
    def of(cls, objective: ObjectiveFields) -> Coefficients:
        """Return the coefficients that an objective begins with."""
        return cls(objective, objective.kl_coef, objective.entropy_coef)

    @property
    def adaptive(self) -> bool:
        """True if a controller changes a coefficient, so that a checkpoint has to keep it."""
        return "adaptive" in (self.objective.kl_controller, self.objective.entropy_controller)

    @property
    def entropy_in_use(self) -> float:
        """Coefficient of the entropy bonus of the next update; 0 while an adaptive controller rests."""
        resting = (
            self.objective.entropy_controller == "adaptive"
            and self.last_entropy > self.objective.entropy_target
        )
        return 0.0 if resting else self.entropy

    def after_rollout(self, kl: float, samples: int) -> None:
        """Adapt the coefficient of the KL."""
        if self.objective.kl_controller == "adaptive":
            self.kl = adapted_kl_coef(self.kl, kl, samples, self.objective)

    def after_update(self, entropy: float) -> None:
        """Adapt the coefficient of the entropy bonus."""
        if self.objective.entropy_controller == "adaptive":
            self.entropy = adapted_entropy_coef(self.entropy, entropy, self.objective)
            self.last_entropy = entropy

    def state_dict(self) -> dict[str, float | None]:
        """Return the state as values of JSON, which has no infinity."""
        known = math.isfinite(self.last_entropy)
        return {"kl": self.kl, "entropy": self.entropy, "last_entropy": self.last_entropy if known else None}

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        """Go on from a state."""
        kl, entropy, last = (state[name] for name in ("kl", "entropy", "last_entropy"))
        assert kl is not None
        assert entropy is not None
        self.kl, self.entropy = kl, entropy
        self.last_entropy = math.inf if last is None else last
