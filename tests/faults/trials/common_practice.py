"""Checks of common practice, measured on the verdicts of a replay: what they would have noticed of a fault."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from regress.compare.verdicts.verdict import Verdict
from regress.golden.golden_case import GoldenCase
from regress.replay.replay_plan import PlannedUpdate

LIMITS: Mapping[str, tuple[str, float]] = {
    "loss 5 %": ("loss", 0.05),
    "loss 1 %": ("loss", 0.01),
    "norm 3 %": ("grad_norm", 0.03),
    "cosine 0.99": ("1 - cosine", 0.01),
    "L2 8.3 %": ("relative L2", 0.083),
    "allclose": ("relative log-prob", 1e-5),
    "mean 1e-3": ("mean log-prob", 1e-3),
}
"""Check -> the value that it looks at, and the most that it lets pass.

The loss of an update and its gradient's norm are relative errors; cosine and relative L2 are those of the worst
gradient; ``torch.allclose`` has ``rtol=1e-5``, beside which its ``atol=1e-8`` is
nothing; the mean is that of all log-probs of the loss tokens.
"""

_NOTHING = 1e-9
"""Share of the largest gradient below which one is rounding, such as that of a key's bias, and has no direction."""


def measured(
    case: GoldenCase, plan: Sequence[PlannedUpdate], verdicts: Sequence[Verdict]
) -> dict[str, float]:
    """Return the values that the checks look at; those that cannot be measured are left out."""
    found = {
        "loss": _loss(case, plan, verdicts),
        "grad_norm": _largest(v.relative for v in verdicts if v.quantity == "grad_norm"),
        **_gradients([v for v in verdicts if v.quantity == "gradient" and v.count]),
        **_log_probs([v for v in verdicts if v.quantity == "log_probs" and v.count]),
    }
    return {name: value for name, value in found.items() if value is not None}


def noticed(values: Mapping[str, float]) -> dict[str, bool]:
    """Return what each check says of measured values; those without their value are left out."""
    return {check: not values[name] <= limit for check, (name, limit) in LIMITS.items() if name in values}


def _largest(values: Iterable[float]) -> float | None:
    return max(values, default=None)


def _loss(case: GoldenCase, plan: Sequence[PlannedUpdate], verdicts: Sequence[Verdict]) -> float | None:
    """Return the largest relative error of the loss of an update, of which microbatches and ranks have shares."""
    errors = []
    for update in plan:
        truth = case.truth(update.where)
        weights, losses = truth.get("weights", {}), truth.get("token_loss", {})
        if not weights or not losses:
            return None
        golden = float(sum((w * x).sum() for w, x in zip(weights.values(), losses.values(), strict=True)))
        own = [v for v in verdicts if v.name == v.quantity == "loss" and _of(v, update)]
        if own and golden:
            errors.append(abs(sum(v.mean_error * v.count for v in own) / golden))
    return max(errors, default=None)


def _of(verdict: Verdict, update: PlannedUpdate) -> bool:
    """Return True for verdicts of an update, on ranks that compute the same loss only once."""
    place = verdict.place
    if (place.step, place.update) != (update.step, update.update) or place.rank is None:
        return False
    return update.ranks.mesh.coordinates(place.rank)["tp"] == 0


def _gradients(verdicts: Sequence[Verdict]) -> dict[str, float | None]:
    most = max((v.scale for v in verdicts), default=0.0)
    told = [v for v in verdicts if v.scale > _NOTHING * most]
    cosines = [_cosine(v.alpha, v.residual) for v in told if v.alpha is not None and v.residual is not None]
    return {
        "1 - cosine": None if not cosines else 1.0 - min(cosines),
        "relative L2": _largest(v.relative_l2 for v in told),
    }


def _cosine(alpha: float, residual: float) -> float:
    """Return the cosine of golden values and ``alpha`` times them plus a residual that is orthogonal to them."""
    length = math.hypot(alpha, residual)
    return alpha / length if length else 0.0


def _log_probs(verdicts: Sequence[Verdict]) -> dict[str, float | None]:
    count = sum(v.count for v in verdicts)
    mean = abs(sum(v.mean_error * v.count for v in verdicts)) / count if count else None
    return {"relative log-prob": _largest(v.max_relative for v in verdicts), "mean log-prob": mean}
