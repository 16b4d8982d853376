"""AdamW as a run's configuration, or the record of an optimizer's state, tells it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from regress.dump.source_readers import Source

Floats: TypeAlias = NDArray[np.float64]
CLIP_EPS = 1e-6
"""Added to the norm by ``torch.nn.utils.clip_grad_norm_``."""
STATE = ("exp_avg", "exp_avg_sq")
"""Moments in the optimizer's record, as torch names them."""
_TOLD = (
    "optimizer_type",
    "learning_rates",
    "betas",
    "eps",
    "weight_decay",
    "amsgrad",
    "maximize",
    "max_grad_norm",
)


def other_settings(golden: Source, actual: Source) -> Iterator[str]:
    """Yield a sentence where the first records of the optimizers' states that two sources have tell other settings."""
    told = [next(_told(side), {}) for side in (golden, actual)]
    found = [
        f"{key} {own} and {other}"
        for key in _TOLD
        if key in told[0] and key in told[1]
        for own, other in [_unlike(told[0][key], told[1][key])]
        if own != other
    ]
    if found:
        yield f"the optimizers have other settings, as records of their states tell: {', '.join(found)}"


def _told(side: Source) -> Iterator[Mapping[str, Any]]:
    records = (side.read(name).meta for name, (type, _) in side.entries.items() if type == "optimizer")
    yield from (meta for meta in records if "optimizer_type" in meta)


def _unlike(own: object, other: object) -> tuple[object, object]:
    """Return two settings, or those of the first parameter where they differ."""
    if not isinstance(own, Mapping) or not isinstance(other, Mapping):
        return own, other
    pairs = ((f"{own[name]} of {name}", f"{other[name]} of {name}") for name in own if name in other)
    return next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))


@dataclass(frozen=True)
class Adam:
    """Settings of AdamW, as a run's configuration tells them."""

    rate: float
    betas: tuple[float, float]
    eps: float
    max_norm: float | None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Adam | None:
        """Return the settings; None if the configuration does not tell them, or names another optimizer."""
        section = config.get("optimizer")
        if (
            not isinstance(section, Mapping)
            or section.get("factory") is not None
            or section.get("state_path") is not None
        ):
            return None
        betas, numbers = section.get("betas"), [section.get("learning_rate"), section.get("eps")]
        if not isinstance(betas, list | tuple) or len(betas) != 2:
            return None
        known = [number for number in (*numbers, *betas) if isinstance(number, int | float)]
        if len(known) < 4 or not all(math.isfinite(number) and number >= 0 for number in known):
            return None
        if max(known[2:]) >= 1:
            return None
        norm = section.get("max_grad_norm")
        limit = float(norm) if isinstance(norm, int | float) else None
        return cls(float(known[0]), (float(known[2]), float(known[3])), float(known[1]), limit)

    @classmethod
    def recorded(cls, meta: Mapping[str, Any], name: str) -> Adam | None:
        """Return the settings that a record of an optimizer's state tells of one parameter; None for another optimizer.

        What is recorded so was clipped before: the moments are those of the gradients as they were used.
        """
        kind, rate, betas, eps, *other = (
            value.get(name) if isinstance(value := meta.get(key), Mapping) else value
            for key in ("optimizer_type", "learning_rates", "betas", "eps", "amsgrad", "maximize")
        )
        if str(kind).rpartition(".")[2].lower() not in ("adam", "adamw") or any(other):
            return None
        return cls.of({"optimizer": {"learning_rate": rate, "betas": betas, "eps": eps}})

    @property
    def most(self) -> float:
        """Most that an update moves an element, whatever its gradients (Kingma & Ba, 1412.6980, section 2.1)."""
        beta1, beta2 = self.betas
        return self.rate * max(1.0, (1 - beta1) / math.sqrt(1 - beta2))

    def direction(self, first: Floats, second: Floats, count: int) -> Floats:
        """Return the update over the learning rate, from the moments after ``count`` updates."""
        beta1, beta2 = self.betas
        root = np.sqrt(second / (1 - beta2**count)) + self.eps
        with np.errstate(divide="ignore", invalid="ignore"):
            found = first / (1 - beta1**count) / root
        return np.where(root > 0, found, 0.0)

    def clipped(self, gradient: Floats, norm: object) -> Floats:
        """Return a gradient as the optimizer gets it, scaled down to the largest norm."""
        if self.max_norm is None or not isinstance(norm, int | float) or not math.isfinite(norm):
            return gradient
        return gradient * min(1.0, self.max_norm / (norm + CLIP_EPS))
