"""Metrics of an update, stored so that microbatches and ranks add up exactly."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from regress.grpo.token_losses import TokenLoss


@dataclass(frozen=True)
class Metric:
    """A mean as its sum and count, or an extreme; ``a + b`` is the metric of both parts together."""

    total: float
    count: int
    kind: Literal["mean", "min", "max"] = "mean"

    @property
    def value(self) -> float:
        """The mean or extreme; NaN if nothing was counted."""
        if self.count == 0:
            return float("nan")
        return self.total / self.count if self.kind == "mean" else self.total

    def __add__(self, other: "Metric") -> "Metric":
        if self.kind != other.kind:
            raise ValueError(
                f"a {self.kind} and a {other.kind} do not add up: add metrics of the same name only"
            )
        parts = [part.total for part in (self, other) if part.count]
        if not parts:
            return self
        total = sum(parts) if self.kind == "mean" else min(parts) if self.kind == "min" else max(parts)
        return Metric(total, self.count + other.count, self.kind)


def add_metrics(first: Mapping[str, Metric], second: Mapping[str, Metric]) -> dict[str, Metric]:
    """Return the metrics of two parts of a batch together; a name that one part lacks is taken from the other."""
    return {
        name: first[name] + second[name] if name in first and name in second else {**second, **first}[name]
        for name in {**first, **second}
    }


@dataclass(frozen=True)
class TokenMetric:
    """Metric over the loss tokens of an update.

    Attributes:
        unit, definition: for people.
        values: of the tokens that count, ``[K]``; None where the loss has none.
        kind: what becomes of them.
        needs: what a run must have to report it; empty: nothing.
    """

    unit: str
    definition: str
    values: Callable[[TokenLoss], Tensor | None]
    kind: Literal["mean", "min", "max"] = "mean"
    needs: str = ""

    def of(self, loss: TokenLoss) -> Metric | None:
        """Return the metric of one microbatch; None where it has none."""
        values = self.values(loss)
        if values is None:
            return None
        if self.kind == "mean":
            return Metric(float(values.detach().double().sum()), values.numel())
        if not values.numel():
            return Metric(0.0, 0, self.kind)
        extreme = values.min() if self.kind == "min" else values.max()
        return Metric(float(extreme.detach()), values.numel(), self.kind)


def _kept_entropy(loss: TokenLoss) -> Tensor | None:
    return None if loss.entropy_K is None or loss.kept_K is None else loss.entropy_K[loss.kept_K]


TOKEN_METRICS: Mapping[str, TokenMetric] = {
    "policy_loss": TokenMetric(
        "1", "mean policy loss over loss tokens, whatever the aggregation", lambda loss: loss.policy_K
    ),
    "clip_ratio/low": TokenMetric(
        "share", "loss tokens clipped from below (negative advantage)", lambda loss: loss.clipped_low_K
    ),
    "clip_ratio/high": TokenMetric(
        "share", "loss tokens clipped from above (positive advantage)", lambda loss: loss.clipped_high_K
    ),
    "clip_ratio/dual": TokenMetric(
        "share", "loss tokens at which the dual clip replaced the loss", lambda loss: loss.dual_clipped_K
    ),
    "approx_kl/k1": TokenMetric(
        "nats",
        'mean of log p_old - log p over loss tokens (J. Schulman, "Approximating KL divergence")',
        lambda loss: -loss.log_ratio_K,
    ),
    "approx_kl/k3": TokenMetric(
        "nats",
        "mean of exp(x) - 1 - x, x = log p - log p_old",
        lambda loss: torch.expm1(loss.log_ratio_K) - loss.log_ratio_K,
    ),
    "ratio/mean": TokenMetric(
        "1", "mean importance ratio, at the objective's level", lambda loss: loss.ratio_K
    ),
    "kl": TokenMetric(
        "nats",
        "mean over loss tokens of the KL term of the loss (algorithm.kl_estimator), with log p of the update's own "
        "forward pass; the coefficient is left out",
        lambda loss: loss.kl_K,
        needs="a reference model",
    ),
    "entropy": TokenMetric(
        "nats",
        "mean entropy of the policy at loss tokens",
        lambda loss: loss.entropy_K,
        needs="an entropy term",
    ),
    "sampler_weight": TokenMetric(
        "1",
        "mean correction weight of the sampler's mismatch",
        lambda loss: loss.correction_K,
        needs="algorithm.sampler_correction",
    ),
    "kept": TokenMetric(
        "share",
        "loss tokens that masks of the objective leave to the policy loss",
        lambda loss: loss.kept_K,
        needs="a mask of the objective",
    ),
    "entropy/kept": TokenMetric(
        "nats",
        "mean entropy of the policy at those tokens",
        _kept_entropy,
        needs="a mask of the objective and an entropy term",
    ),
    "ratio/min": TokenMetric("1", "least importance ratio", lambda loss: loss.ratio_K, "min"),
    "ratio/max": TokenMetric("1", "greatest importance ratio", lambda loss: loss.ratio_K, "max"),
}
"""Metrics of an update over its loss tokens: a metric is one entry here."""


def token_metrics(loss: TokenLoss) -> dict[str, Metric]:
    """Return the metrics over the loss tokens of one microbatch, by their names in `TOKEN_METRICS`."""
    found = {name: entry.of(loss) for name, entry in TOKEN_METRICS.items()}
    return {name: metric for name, metric in found.items() if metric is not None}
