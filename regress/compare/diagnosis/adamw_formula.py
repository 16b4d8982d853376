"""One AdamW update as a formula of its gradient, its settings and the state before it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
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
_BETAS = (0.9, 0.95, 0.8), (0.999, 0.95, 0.99, 0.98, 0.9)
"""Decays of the moments that trainers are known to use, where the first update alone tells none of its own."""
_EPS = (1e-8, 1e-6, 1e-5, 1e-10, 1e-15)
_FITS, _ROUNDED = 1e-4, 1e-2
"""Most of a moment, and of a step as parameters round it, that settings may leave unexplained."""


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


def proven_settings(
    after: Mapping[str, Floats],
    before: Mapping[str, Floats],
    gradient: Floats | None,
    norm: float,
    count: float,
    told: Adam | None = None,
    decay: float | None = None,
) -> AdamW | None:
    """Return the settings that the values of an update prove; None where they prove none.

    Where nothing tells the parameters before the update, the learning rate is NaN.

    Args:
        after, before: ``exp_avg``, ``exp_avg_sq`` and ``param``, as far as they are known; the moments before the first
            update are 0.
        told: settings that need no proof, with the weight ``decay``; the clip of gradients is not among them, and is
            taken for none where nothing tells the moments before the update.
    """
    if gradient is None or not gradient.any():
        return None
    after, before, g = _few(after), _few(before), _few({"": gradient})[""]
    start = before if count > 1 else {**before, **{key: np.zeros_like(after[key]) for key in MOMENTS}}
    if told is not None and not {*MOMENTS} <= {*start}:
        return AdamW(told.rate, *told.betas, told.eps, decay or 0.0, None, count)
    common = _BETAS if told is None else tuple((beta,) for beta in told.betas)
    firsts, seconds = (
        [*_decays(after[key], start.get(key), term, betas)]
        for key, term, betas in zip(MOMENTS, (g, g**2), common, strict=True)
    )
    for (beta1, first), (beta2, second) in product(firsts, seconds):
        clip = first / (1 - beta1)
        if not 0 < clip <= 1 + _FITS or not math.isclose(clip**2, second / (1 - beta2), rel_tol=_FITS):
            continue
        limit = None if clip >= 1 - _FITS else clip * (norm + CLIP_EPS)
        found = AdamW(math.nan, beta1, beta2, _EPS[0], 0.0, limit, count)
        if told is not None:
            return replace(found, learning_rate=told.rate, eps=told.eps, weight_decay=decay or 0.0)
        return _with_rate(found, after, before.get("param"))
    return None


def _few(values: Mapping[str, Floats]) -> dict[str, Floats]:
    """Return some elements of each tensor, flat: few of them prove what all have in common."""
    return {name: one.reshape(-1)[:: max(1, one.size >> 16)] for name, one in values.items()}


def _decays(
    after: Floats, before: Floats | None, term: Floats, common: Sequence[float]
) -> Iterator[tuple[float, float]]:
    """Yield how a moment decays, and how often a term counts in it: of each common decay where it began with 0."""
    if before is None or before.shape != after.shape:
        return
    parts = [term, before] if before.any() else [term]
    found, left = _fitted(parts, after)
    if left > _FITS:
        return
    if len(parts) == 1:
        yield from ((beta, found[0]) for beta in common)
    elif 0 < found[1] < 1:
        yield float(f"{found[1]:.6g}"), found[0]


def _with_rate(s: AdamW, after: Mapping[str, Floats], before: Floats | None) -> AdamW:
    """Return settings with the learning rate, weight decay and eps that a step from these parameters was made with."""
    if before is None or "param" not in after or before.shape != after["param"].shape:
        return s
    step, found = after["param"] - before, []
    for eps in _EPS:
        made = replace(s, eps=eps)
        (rate, decay), left = _fitted([direction(after, made), before], -step)
        found.append((left, replace(made, learning_rate=rate, weight_decay=decay / rate if rate else 0.0)))
    left, best = min(found, key=lambda one: one[0])
    return best if left <= _ROUNDED and best.learning_rate > 0 else s


def _fitted(parts: Sequence[Floats], values: Floats) -> tuple[list[float], float]:
    """Return the coefficients of the least squares solution, and what it leaves of the values, in norm."""
    matrix = np.stack(parts, axis=1)
    found = np.linalg.lstsq(matrix, values, rcond=None)[0]
    size = float(np.linalg.norm(values))
    return found.tolist(), float(np.linalg.norm(values - matrix @ found)) / size if size else math.inf


def direction(after: Mapping[str, Floats], s: AdamW) -> Floats:
    """Return an update over its learning rate, from the moments after it."""
    adam = Adam(0.0, (s.beta1, s.beta2), s.eps, None)
    return adam.direction(after["exp_avg"], after["exp_avg_sq"], int(s.count))


def made_twice(formula: Formula) -> Formula:
    """Return the update that follows an update, with the same gradient."""
    after = {name: formula.values(result) for result, name in STATE.items()}
    state = {name: values for name, values in after.items() if values is not None}
    count = formula.settings.count + 1
    return replace(formula.changed(count=count), inputs={**formula.inputs, **state})


def _eps_inside_of_the_root(values: Mapping[str, Tensor], s: AdamW) -> dict[str, Tensor]:
    return adamw(values, replace(s, eps=s.eps / (1 - s.beta2**s.count) ** 0.5))
