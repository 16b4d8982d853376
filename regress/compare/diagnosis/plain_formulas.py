"""Values that the configured objective makes of the golden inputs, as far as it is known.

Hypotheses are changes of these formulas. Where a change leaves the values as they are, it explains none of them: every
ratio of a first update is 1, and a clip range with its sides swapped stops the same tokens if nothing is clipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from regress.compare.diagnosis.hypotheses import Floats
from regress.layout import TokenFrame

Token = Callable[[str], Floats | None]


@dataclass(frozen=True)
class PlainFormulas:
    """Values ``[frame.size]`` of a quantity, made of the golden values of its inputs.

    Attributes:
        token: golden values of a quantity, None where they are unknown.
        sample_means: mean (or ``total``) over the loss tokens of each sample, at all tokens of the sample.
        objective: section ``algorithm`` of the configuration, as far as it is known.
        clip: the range that ratios are clipped to; None where it is unknown.
        sampler: log-probs that the sampler reported.
        first: asks whether this update is the first on its rollouts: the policy is that which they precede.
    """

    token: Token
    sample_means: Callable[..., Floats]
    frame: TokenFrame
    objective: Mapping[str, Any]
    clip: tuple[float, float] | None
    sampler: Floats | None
    first: Callable[[], bool]

    def of(self, quantity: str, name: str) -> Floats | None:
        """Return the values of a tensor; None where the objective or an input is unknown."""
        if quantity == "batch_inputs":
            known = name == "position_ids"
            lengths = [np.arange(length) for length in self.frame.lengths]
            return np.concatenate(lengths).astype(np.float64) if known and lengths else None
        formula = _FORMULAS.get(quantity)
        return None if formula is None else formula(self)

    def _gap(self, other: str) -> Floats | None:
        policy, before = self.token("log_probs"), self.token(other)
        return None if policy is None or before is None else policy - before

    def _ratio(self) -> Floats | None:
        gap, level = self._gap("old_log_probs"), self.objective.get("importance_level")
        if gap is None or level not in ("token", "sequence", "sequence_product"):
            return None
        if level != "token":
            gap = self.sample_means(gap, total=level == "sequence_product")
        low, high = (self.objective.get(f"log_ratio_{end}") for end in ("min", "max"))
        return np.exp(np.clip(gap, -np.inf if low is None else low, 700.0 if high is None else high))

    def _kl(self) -> Floats | None:
        gap, estimator = self._gap("ref_log_probs"), str(self.objective.get("kl_estimator"))
        if gap is None or self.objective.get("kl_bias_correction"):
            return None
        known: dict[str, Callable[[Floats], Floats]] = {
            "k1": lambda d: d,
            "k2": lambda d: 0.5 * d**2,
            "k3": lambda d: np.exp(-d) + d - 1,
            "abs": np.abs,
        }
        formula = known.get(estimator.removesuffix("+"))
        return None if formula is None else formula(gap)

    def _policy_loss(self) -> Floats | None:
        ratio, advantages, weights = map(self.token, ("ratio", "advantages", "sampler_weights"))
        if ratio is None or advantages is None or self.objective.get("loss", "ppo_clip") != "ppo_clip":
            return None
        low, high = self.clip or (-np.inf, np.inf)
        clipped = -np.minimum(ratio * advantages, np.clip(ratio, low, high) * advantages)
        return np.asarray(clipped if weights is None else clipped * weights)

    def _sampler_weights(self) -> Floats | None:
        before = self.token("old_log_probs")
        return None if before is None or self.sampler is None else np.exp(before - self.sampler)

    def _of_the_policy(self) -> Floats | None:
        return self.token("log_probs") if self.first() else None


_FORMULAS: Mapping[str, Callable[[PlainFormulas], Floats | None]] = {
    "ratio": PlainFormulas._ratio,
    "kl": PlainFormulas._kl,
    "policy_loss": PlainFormulas._policy_loss,
    "sampler_weights": PlainFormulas._sampler_weights,
    "old_log_probs": PlainFormulas._of_the_policy,
}
