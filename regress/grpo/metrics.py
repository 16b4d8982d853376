"""Metrics of an update, stored so that microbatches and ranks add up exactly."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from regress.grpo.losses import TokenLoss


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


def token_metrics(loss: TokenLoss) -> dict[str, Metric]:
    """Return the metrics over the loss tokens of one microbatch.

    - ``clip_ratio/low``, ``clip_ratio/high``, ``clip_ratio/dual``: share of tokens clipped (see `TokenLoss`).
    - ``approx_kl/k1``, ``approx_kl/k3``: KL of the old policy from the new one, mean of -x and of
      exp(x) - 1 - x with x = log p - log p_old. J. Schulman, "Approximating KL divergence".
    - ``ratio/mean``, ``ratio/min``, ``ratio/max``: importance ratio at the objective's level.
    - ``kept``, ``entropy/kept``: share of tokens that masks of the objective leave to the policy loss, and their mean
      entropy; where there are such masks.
    - ``policy_loss``: mean over tokens whatever the aggregation; ``kl``, ``entropy`` (nats) and
      ``sampler_weight``: where there are such.
    """
    x = loss.log_ratio_K
    means: dict[str, Tensor | None] = {
        "policy_loss": loss.policy_K,
        "clip_ratio/low": loss.clipped_low_K,
        "clip_ratio/high": loss.clipped_high_K,
        "clip_ratio/dual": loss.dual_clipped_K,
        "approx_kl/k1": -x,
        "approx_kl/k3": torch.expm1(x) - x,
        "ratio/mean": loss.ratio_K,
        "kl": loss.kl_K,
        "entropy": loss.entropy_K,
        "sampler_weight": loss.correction_K,
    }
    count = x.numel()
    metrics = {
        name: Metric(float(values.double().sum()), count)
        for name, values in means.items()
        if values is not None
    }
    if loss.kept_K is not None:
        metrics["kept"] = Metric(float(loss.kept_K.double().sum()), count)
        if loss.entropy_K is not None:
            own = loss.entropy_K[loss.kept_K].double()
            metrics["entropy/kept"] = Metric(float(own.sum()), own.numel())
    metrics["ratio/min"] = Metric(float(loss.ratio_K.min()) if count else 0.0, count, "min")
    metrics["ratio/max"] = Metric(float(loss.ratio_K.max()) if count else 0.0, count, "max")
    return metrics
