"""AdamW as a run's configuration tells it, and the parameters whose update is decided by rounding.

The update of Adam and its relatives is the learning rate times m / sqrt(v). Where m is no larger than its tolerance,
that quotient may be any number between -1 and 1, in two correct runs, too. An example is the bias of the keys in
attention, whose gradient is 0 but for rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from regress.compare.dumps.findings import weight_beside
from regress.compare.dumps.sides import Side
from regress.dump.arrays import Array
from regress.dump.record import Record

Floats: TypeAlias = NDArray[np.float64]
CLIP_EPS = 1e-6
"""Added to the norm by ``torch.nn.utils.clip_grad_norm_``."""
STATE = ("exp_avg", "exp_avg_sq")
"""Moments in the optimizer's record, as torch names them."""


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
        told = config.get("optimizer")
        if (
            not isinstance(told, Mapping)
            or told.get("factory") is not None
            or told.get("state_path") is not None
        ):
            return None
        betas, numbers = told.get("betas"), [told.get("learning_rate"), told.get("eps")]
        if not isinstance(betas, list | tuple) or len(betas) != 2:
            return None
        known = [number for number in (*numbers, *betas) if isinstance(number, int | float)]
        if len(known) < 4 or not all(math.isfinite(number) and number >= 0 for number in known):
            return None
        if max(known[2:]) >= 1:
            return None
        norm = told.get("max_grad_norm")
        limit = float(norm) if isinstance(norm, int | float) else None
        return cls(float(known[0]), (float(known[2]), float(known[3])), float(known[1]), limit)

    @classmethod
    def recorded(cls, meta: Mapping[str, Any], name: str) -> Adam | None:
        """Return the settings that a record of an optimizer's state tells of one parameter; None for another optimizer.

        What is recorded so was clipped before: the moments are those of the gradients as they were used.
        """
        rates, kind = meta.get("learning_rates"), str(meta.get("optimizer_type")).rpartition(".")[2].lower()
        if kind not in ("adam", "adamw") or not isinstance(rates, Mapping):
            return None
        if meta.get("amsgrad") or meta.get("maximize"):
            return None
        told = {"learning_rate": rates.get(name), "betas": meta.get("betas"), "eps": meta.get("eps")}
        return cls.of({"optimizer": told})

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


def decided(
    name: str, golden: Array, actual: Array, sides: tuple[Side, Side], records: tuple[str, str], bound: float
) -> Array | None:
    """Take the golden value where rounding decides a parameter; None if nothing tells of such elements.

    Args:
        golden, actual: a parameter after the same update, in one layout.
        records: names of the two records that hold it.
        bound: tolerance of the moments, relative to the largest.
    """
    known = _moments(sides[0], records[0], name, golden.shape)
    other = _moments(sides[1], records[1], name, golden.shape)
    if known is None or other is None:
        return None
    (ours, scale, rate), (theirs, _, _) = known, other
    rate *= 1 + (sides[0].entries[records[0]][1].step or 0)  # the updates that may have added up
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.minimum(2.0, bound * scale / np.abs(ours))
    error = np.abs(golden.astype(np.float64) - actual.astype(np.float64))
    settled = (ours != theirs) & (error <= rate * share)
    return np.where(settled, golden, actual) if settled.any() else None


def _moments(side: Side, record: str, name: str, shape: tuple[int, ...]) -> tuple[Array, float, float] | None:
    """Return the first moment of a parameter, the largest of it and its weight's, and the learning rate."""
    _, _, rest = record.partition("/")
    state = f"optimizer/{rest}"
    if state not in side.entries:
        return None
    found: Record = side.read(state)
    rates = found.meta.get("learning_rates")
    rate = rates.get(name) if isinstance(rates, Mapping) else None
    if not isinstance(rate, float) or any(f"{name}/{key}" not in found.tensors for key in STATE):
        return None
    moment = found.tensors[f"{name}/{STATE[0]}"].astype(np.float64)
    if moment.shape != shape:
        return None
    return moment, max(_largest(moment), _beside(found.tensors, name)), rate


def _beside(tensors: Mapping[str, Array], name: str) -> float:
    """Return the largest first moment of the weight beside a bias; 0 for any other parameter."""
    weight = tensors.get(f"{weight_beside(name)}/{STATE[0]}")
    return 0.0 if weight is None else _largest(weight)


def _largest(array: Array) -> float:
    return float(np.abs(array).max(initial=0.0))
