"""Presets that give the recorded gradients, and departures from the nearest one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from regress.errors import CompareError, RegressError
from regress.explain.aggregation_weights import RESAMPLED
from regress.explain.denominator_readings import EXACT, Reading
from regress.explain.hypothesis_search import Found
from regress.explain.loss_tokens import Mask
from regress.explain.objective_gradients import Evaluated
from regress.explain.policy_log_probs import Policies
from regress.explain.statement import Statement
from regress.grpo.objective_presets import PRESETS, make_objective

SHOWN = 12
"""Most presets that a sentence names."""
ROUNDED = 2e-2
"""Unexplained part that rounding to bfloat16 may leave of gradients that nothing else explains."""
LOOSE = ("eps", "norm_length")
"""Fields that are constants of a run rather than part of a preset."""


def agreements(mask: Mask, known: Policies, readings: list[Reading], found: Found) -> Iterator[Statement]:
    """Yield statements on presets: those that give the recorded gradients, else the nearest and where it differs.

    There is none on a loss that leaves tokens out, often at random, nor where no preset can have such gradients.
    """
    if _unlike_any(mask, readings) or any(reading.match.factor.departure for reading in readings):
        return
    model = Evaluated(mask, known, readings[0], found)
    if model.coefficients.get("kl_coef", 0.0) < 0:
        return
    if abs(readings[0].factor - 1) > max(EXACT, found.tolerance):
        yield from _in_proportion(model, [*PRESETS], found)
        return
    left = {name: rest for name in PRESETS if (rest := model.tried(name, {})) is not None}
    same = [name for name, value in left.items() if value <= found.tolerance]
    if same:
        others = [value for name, value in left.items() if name not in same]
        evidence = {"unexplained": max(left[name] for name in same)}
        yield _same(model, same, evidence | ({"others leave at least": min(others)} if others else {}))
    elif left:
        nearest = _nearest(model, readings, [*PRESETS], found)
        if nearest is not None:
            name, changes, unexplained = nearest
            text = f"the nearest preset, {name}, would have other gradients; it has them with {_words(name, changes)}"
            yield Statement(
                "preset", text, (name, changes), {"unexplained": unexplained} | model.coefficients
            )


def followed(mask: Mask, known: Policies, readings: list[Reading], found: Found, expected: str) -> Statement:
    """Return the statement on the preset that the trainer should follow: that it does, or a departure.

    Raises:
        CompareError: if the update does not tell. RegressError: if the preset cannot be evaluated on it.
    """
    unlike = _unlike_any(mask, readings)
    if unlike:
        raise CompareError(unlike)
    model = Evaluated(mask, known, readings[0] if readings else None, found)
    if not readings:
        model.solve_kl(expected)
    left = model.unexplained(expected, {})
    evidence = {"unexplained": left} | model.coefficients
    if left <= found.tolerance:
        return _same(model, [expected], evidence)
    if not readings and left <= ROUNDED:
        raise CompareError(f"""nothing explains the gradients, and {expected} leaves {left:.1e} of them, as rounding
        may: record in float32""")
    text = f"the preset that is expected, {expected}, would have other gradients"
    nearest = _nearest(model, readings, [expected], found)
    if nearest is None:
        return Statement("preset", text, (expected,), evidence, departure=True)
    _, changes, left = nearest
    text += f"; it has them with {_words(expected, changes)}"
    evidence |= {"unexplained": left}
    return Statement("preset", text, (expected, changes), evidence, departure=True)


def _unlike_any(mask: Mask, readings: list[Reading]) -> str:
    """Return why no preset can be compared with the gradients; empty if any can."""
    if any(reading.rule.aggregation == RESAMPLED for reading in readings):
        return "samples count as often as they are drawn, which is not a part of a preset"
    if any(reading.match.factor.weight is not None for reading in readings):
        return "the policy loss is weighed for the sampler, by weights that nothing but the recording tells"
    if mask.left_out is not None:
        return f"the loss {mask.selection}, and which ones is not known before"
    if not mask.complete:
        return "the loss tokens of samples without a gradient are unknown: tap trajectories or response_mask"
    return ""


def _same(model: Evaluated, names: list[str], evidence: dict[str, Any]) -> Statement:
    more = f" and {len(names) - SHOWN} others" if len(names) > SHOWN else ""
    given = "" if model.from_rewards else ", given these advantages"
    where = "in this update" if model.whole else "at the tokens of this update that have a gradient"
    text = f"the same gradients as {', '.join(names[:SHOWN])}{more}, {where}{given}"
    return Statement("preset", text, tuple(names), evidence | model.coefficients)


def _words(name: str, changes: dict[str, Any]) -> str:
    reference = make_objective(name)
    return ", ".join(
        f"{field} {value!r} in place of {getattr(reference, field)!r}" for field, value in changes.items()
    )


def _in_proportion(model: Evaluated, names: list[str], found: Found) -> Iterator[Statement]:
    """Yield presets whose gradients are the recorded ones up to a factor."""
    factors = {}
    for name in names:
        try:
            own = model.predicted(name, {})
        except RegressError:
            continue
        g = model.recorded
        factor = float(own @ g) / max(float(own @ own), 1e-300)
        if float(np.linalg.norm(g - factor * own)) <= found.tolerance * float(np.linalg.norm(g)):
            factors[name] = factor
    if factors:
        parts = [f"{name} times {factor:.5g}" for name, factor in list(factors.items())[:SHOWN]]
        text = f"the gradients are in proportion to those of {', '.join(parts)}"
        yield Statement("preset", text, (), {"factors": factors} | model.coefficients)


def _nearest(
    model: Evaluated, readings: list[Reading], names: list[str], found: Found
) -> tuple[str, dict[str, Any], float] | None:
    """Return the preset that needs the fewest changed fields to give the gradients, and what they leave unexplained."""
    best: tuple[int, str, dict[str, Any], float] | None = None
    for reading in readings:
        fields = _fields(reading)
        for name in names:
            changes = _changes(name, fields)
            hard = sum(field not in LOOSE for field in changes)
            if best is not None and hard >= best[0]:
                continue
            left = model.tried(name, changes)
            if left is not None and left <= found.tolerance:
                best = hard, name, changes, left
    return None if best is None else best[1:]


def _fields(reading: Reading) -> dict[str, Any]:
    """Return the fields of an objective that a reading determines."""
    fields = dict(reading.match.advantages.fields) | {
        "aggregation": reading.rule.aggregation,
        "norm_length": reading.length if reading.rule.length == "free" else None,
    }
    if reading.rule.scope in ("global", "microbatch"):
        fields["denominator_scope"] = reading.rule.scope
    fields |= reading.match.factor.fields
    if reading.match.penalty is not None:
        fields |= {"kl_bias_correction": False} | reading.match.penalty.fields
    return fields


def _changes(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a preset that have other values in a reading."""
    objective = make_objective(name)
    ours = {field: value for field, value in fields.items() if getattr(objective, field) != value}
    if ours.get("aggregation", objective.aggregation) != "seq-mean-token-sum-norm":
        ours.pop("norm_length", None)
    return ours
