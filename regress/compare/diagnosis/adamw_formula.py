"""One AdamW update as a formula of its gradient, its settings and the state before it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from regress.compare.diagnosis.hypotheses import Floats
from regress.compare.dumps.adamw_settings import CLIP_EPS, Adam

if TYPE_CHECKING:
    from torch import Tensor

    from regress.compare.diagnosis.counterfactuals import Formula

MOMENTS = {"exp_avg": "first_moment", "exp_avg_sq": "second_moment"}
"""Recorded moment -> the input that it is made of."""
STATE = {**MOMENTS, "param": "parameters"}
"""Result of an update -> the input that it is made of."""


@dataclass(frozen=True)
class AdamW:
    """Settings of an update, the ``count``-th of its parameter.

    Attributes:
        sign: -1 for an update uphill.
        coupled: True for a weight decay that is added to the gradient.
    """

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_grad_norm: float | None
    count: float
    sign: float = 1.0
    coupled: bool = False

    @classmethod
    def of(cls, section: Mapping[str, Any], count: float) -> AdamW | None:
        """Return the settings that section ``optimizer`` of a configuration tells; None unless it tells all."""
        settings, decay = Adam.of({"optimizer": {**section, "state_path": None}}), section.get("weight_decay")
        if settings is None or count < 1 or not isinstance(decay, int | float) or not math.isfinite(decay):
            return None
        return cls(
            settings.rate, *settings.betas, settings.eps, float(decay), settings.max_norm or None, count
        )


def clip_factor(norm: Tensor, s: AdamW) -> Tensor | float:
    """Return the factor by which gradients are clipped (torch.nn.utils.clip_grad_norm_)."""
    return 1.0 if s.max_grad_norm is None else (s.max_grad_norm / (norm + CLIP_EPS)).clamp(max=1.0)


def adamw(values: Mapping[str, Tensor], s: AdamW) -> dict[str, Tensor]:
    """Return exp_avg, exp_avg_sq and param after an update (Loshchilov & Hutter, 1711.05101; torch.optim.AdamW).

    Args:
        values: ``gradient`` and its ``norm`` over all parameters, ``first_moment`` and ``second_moment`` before the
            update, and ``parameters`` where they are known.
    """
    g = s.sign * values["gradient"] * clip_factor(values["norm"], s)
    if s.coupled:
        g = g + s.weight_decay * values["parameters"]
    first = s.beta1 * values["first_moment"] + (1 - s.beta1) * g
    second = s.beta2 * values["second_moment"] + (1 - s.beta2) * g.square()
    found = {"exp_avg": first, "exp_avg_sq": second}
    if "parameters" not in values:
        return found
    root = (second / (1 - s.beta2**s.count)).sqrt() + s.eps
    kept = values["parameters"] * (1 - s.learning_rate * s.weight_decay)
    return {**found, "param": kept - s.learning_rate * (first / (1 - s.beta1**s.count)) / root}


def adamw_formula(s: AdamW, after: Mapping[str, Floats], gradient: Floats | None, norm: float) -> Formula:
    """Return the update whose results are golden, from the state that it must have begun with.

    Each result is linear in the state before it, which is solved for.

    Args:
        after: ``exp_avg``, ``exp_avg_sq`` and, where it is known, ``param`` after the update.
        gradient: None where it is unknown: what is said of it then changes nothing.
    """
    import torch

    from regress.compare.diagnosis.counterfactuals import Formula

    zero = torch.zeros(after["exp_avg"].shape, dtype=torch.float64)
    inputs = {"gradient": zero if gradient is None else torch.from_numpy(np.array(gradient))}
    inputs |= {"norm": torch.tensor(norm, dtype=torch.float64)} | dict.fromkeys(STATE.values(), zero)
    slopes = {"exp_avg": s.beta1, "exp_avg_sq": s.beta2, "param": 1 - s.learning_rate * s.weight_decay}
    for result, name in STATE.items():
        if result not in after:
            del inputs[name]
        elif slopes[result]:
            rest = torch.from_numpy(np.array(after[result])) - adamw(inputs, s)[result]
            inputs[name] = rest.nan_to_num() / slopes[result]
    decay = s.weight_decay / s.learning_rate if s.learning_rate else 0.0
    choices = {
        "max_grad_norm": (None,),
        "count": (s.count + 1, *((s.count - 1,) if s.count > 1 else ()), 1e9),
        "weight_decay": (0.0, decay, 2 * s.weight_decay),
        "eps": (0.0, 1e-6, 1e-8),
        "learning_rate": (0.0,),
        "sign": (-1.0,),
        "coupled": (True,),
    }
    swaps: dict[str, tuple[str, ...]] = dict.fromkeys(("gradient", *MOMENTS.values()), ())
    mistakes = {"eps_inside_of_the_bias_correction": _eps_inside_of_the_root}
    return Formula(adamw, inputs, s, choices, [("beta1", "beta2")], swaps, mistakes)


def made_twice(formula: Formula) -> Formula:
    """Return the update that follows an update, with the same gradient."""
    after = {name: formula.values(result) for result, name in STATE.items()}
    state = {name: values for name, values in after.items() if values is not None}
    count = formula.settings.count + 1
    return replace(formula.changed(count=count), inputs={**formula.inputs, **state})


def _eps_inside_of_the_root(values: Mapping[str, Tensor], s: AdamW) -> dict[str, Tensor]:
    return adamw(values, replace(s, eps=s.eps / (1 - s.beta2**s.count) ** 0.5))
