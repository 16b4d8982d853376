"""Statements on the loss from the fits: advantages, aggregation and denominator, ratio, KL, and common factors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from regress.explain.denominator_readings import EXACT, Reading, epsilons
from regress.explain.hypothesis_search import Found
from regress.explain.loss_tokens import Mask
from regress.explain.policy_log_probs import Policies
from regress.explain.recorded_advantages import configured, contradiction, named
from regress.explain.statement import ON_POLICY, Statement
from regress.explain.term_derivatives import penalties, shifts

SHOWN = 4
"""Most readings that a sentence names."""
NEGLIGIBLE = 1e-3
"""Coefficient of a KL below which its absence counts as shown."""


def statements(found: Found, readings: list[Reading], mask: Mask, known: Policies) -> Iterator[Statement]:
    """Yield statements on every part of the loss that the readings agree on, or on each alternative."""
    yield _advantages(found, readings, mask)
    yield from _aggregation(found, readings, mask)
    yield from _ratio(found, readings, known, mask)
    yield from _kl(found, readings, mask, known)
    yield from _dropped(found, readings, mask)


def _dropped(found: Found, readings: list[Reading], mask: Mask) -> Iterator[Statement]:
    """Yield a departure for samples with an advantage under every reading and no gradient, unless clipped.

    A loss that leaves tokens out may leave out all of a sample.
    """
    silent = ~mask.speaking
    silent[mask.update.sample[found.tokens]] = False
    if mask.expected is None or mask.left_out is not None or not silent.any():
        return
    for reading in readings:
        advantages = np.nan_to_num(reading.match.advantages.values) * mask.expected
        size = np.abs(advantages).max(initial=0.0)
        has = np.bincount(mask.update.sample, np.abs(advantages) > 1e-6 * size, minlength=len(silent)) > 0
        silent = silent & has
    if silent.any():
        names = [
            f"{group}/{run}"
            for (group, run), gone in zip(mask.update.frame.samples, silent, strict=True)
            if gone
        ]
        count = len(names)
        verb = "samples with an advantage have" if count > 1 else "sample with an advantage has"
        text = f"{count} {verb} no gradient at all"
        yield Statement("mask", text, tuple(names), {"samples": names[:SHOWN]}, departure=True)


def _advantages(found: Found, readings: list[Reading], mask: Mask) -> Statement:
    names = distinct(reading.match.advantages.name for reading in readings)
    best = readings[0]
    eps = epsilons(found, best)
    rules = named(mask.update, found.tokens, found.tolerance)
    if rules:
        names = distinct(rule.name for rule in rules)
        eps = sorted({rule.eps for rule in rules if rule.eps is not None})
        text = f"as recorded: {either(names)}" + _eps(eps)
        return Statement(
            "advantages", text, tuple(names), _evidence(found, best) | ({"eps": eps} if eps else {})
        )
    text = either(names)
    why, samples = contradiction(mask.update, found.tokens)
    if why:
        evidence = _evidence(found, best) | {"samples": samples}
        return Statement("advantages", f"{text}, but {why}", tuple(names), evidence, departure=True)
    if best.match.advantages.eps is not None and len(names) == 1:
        text += _eps(eps)
    evidence = _evidence(found, best) | ({"eps": eps} if eps else {})
    return Statement("advantages", text, tuple(names), evidence)


def _eps(eps: list[float]) -> str:
    if not eps:
        return ""
    return f", plus {eps[0]:g}" if len(eps) == 1 else f", plus at most {eps[-1]:g}"


def _aggregation(found: Found, readings: list[Reading], mask: Mask) -> Iterator[Statement]:
    words = distinct(reading.words for reading in readings)
    names = distinct(reading.rule.name for reading in readings)
    best = readings[0]
    evidence: dict[str, Any] = _evidence(found, best) | {"factor": best.factor}
    lengths = sorted({r.length for r in readings if r.length is not None})
    if lengths:
        evidence["constant length"] = lengths
    yield Statement("aggregation", f"the weight of a token is {either(words)}", tuple(names), evidence)
    if all(abs(reading.factor - 1) <= max(EXACT, found.tolerance) for reading in readings):
        return
    causes = distinct(reading.cause for reading in readings if reading.cause)
    evidence = {"factor": best.factor, "unexplained": best.match.fit.unexplained}
    if causes:
        text = f"every gradient is {best.factor:.7g} times what its weight says: {either(causes)}"
        each = {name for cause in causes for name in cause.split(" or ")}
        if "the number of ranks" in each and not _divided(mask):
            text += (
                " (right where gradients are averaged over the ranks afterwards, wrong where they are summed)"
            )
        if "the number of microbatches" in each:
            text += " (right where the means of microbatches are to be added up, as by verl's geo_mean)"
    else:
        sizes = distinct(
            f"{r.factor:.5g} x {r.words} ({r.match.advantages.name})"
            for r in readings
            if r.rule.scope == "global"
        ) or distinct(f"{r.factor:.5g} x {r.words}" for r in readings)
        text = f"gradients are in proportion to this weight, but of another size: {either(sizes)}"
    yield Statement("scale", text, tuple(causes) or (best.factor,), evidence, departure=True)


def _divided(mask: Mask) -> bool:
    """Return True if the recording says by which scale of the backward pass it divided."""
    return all(meta.get("backward_scale") is not None for meta in mask.update.meta)


def _ratio(found: Found, readings: list[Reading], known: Policies, mask: Mask) -> Iterator[Statement]:
    best = readings[0]
    factors = {reading.match.factor.name: reading.match.factor for reading in readings}
    wrong = [factor for factor in factors.values() if factor.departure]
    if wrong and len(wrong) == len(factors):
        evidence = _evidence(found, best)
        yield Statement("detached", wrong[0].departure, ("ratio",), evidence, departure=True)
        return
    if known.on_policy(mask.effective) and not known.assumed:
        text = "every ratio is 1: what the ratio is of, its clip range and the loss around it make no difference here"
        yield Statement("ratio", text, (ON_POLICY,), {"tokens": len(found.tokens)})
    elif known.on_policy(mask.effective) is False:
        evidence = _evidence(found, best)
        yield Statement("ratio", either(list(factors)), tuple(factors), evidence)


def _kl(found: Found, readings: list[Reading], mask: Mask, known: Policies) -> Iterator[Statement]:
    names = distinct(
        "none" if reading.match.penalty is None else reading.match.penalty.name for reading in readings
    )
    best = readings[0]
    if "none" not in names:
        coefficients = [
            (m.penalty, m.fit.penalty / m.fit.scale, m.factor) for m in (r.match for r in readings)
        ]
        found_here = [(term, value, factor) for term, value, factor in coefficients if term is not None]
        words = distinct(f"{term.name} with coefficient {value:.5g}" for term, value, _ in found_here)
        evidence = _evidence(found, best) | {"coefficient": [value for _, value, _ in found_here]}
        less = [value for term, value, factor in found_here if shifts(term, factor, found.tokens)]
        if less:
            words += distinct(f"none, and advantages that are all less by {value:.5g}" for value in less)
            names.append("none")
        text = either(words)
        away = "none" not in names and all(value < 0 for _, value, _ in found_here)
        text += ", which drives the policy away from the reference" if away else ""
        yield Statement("kl", text, tuple(names), evidence, departure=away)
        return
    if len(names) > 1:
        return
    bounds = _bounds(found, best, mask, known)
    evidence = {"unexplained": best.match.fit.unexplained}
    if bounds:
        evidence["coefficient at most"] = bounds
    hidden = [name for name, bound in bounds.items() if bound > NEGLIGIBLE]
    if hidden and len(hidden) == len(bounds):
        return
    text = "no KL has a gradient"
    text += f" (one of {', '.join(hidden)} could not be seen: policy and reference agree)" if hidden else ""
    yield Statement("kl", text, ("none",), evidence)
    reason = _recorded_kl(mask)
    if reason and not hidden:
        text = f"{reason}, but it has no gradient: it is detached"
        yield Statement("detached", text, ("kl",), evidence, departure=True)


def _bounds(found: Found, best: Reading, mask: Mask, known: Policies) -> dict[str, float]:
    """Return the largest coefficient that each KL could have without being noticed."""
    weights = best.match.rules[0].values[found.tokens] * abs(best.match.fit.scale)
    g = mask.g[found.tokens]
    limit = found.tolerance * float(np.sqrt(g @ g))
    out = {}
    for term in penalties(mask, known):
        column = term.values[found.tokens] * weights
        size = float(np.sqrt(column @ column))
        out[term.name] = limit / size if size > 0 else float("inf")
    return {name: min(bound, 1e300) for name, bound in out.items()}


def _recorded_kl(mask: Mask) -> str:
    """Return evidence that the trainer's loss has a KL term; empty if there is none."""
    value = mask.update.losses.get("kl_loss")
    if value:
        return f"the loss has a KL term of {value:.3g}"
    objective = configured(mask.update)
    if objective is not None and objective.kl_in_loss:
        return f"the configuration has a KL term with coefficient {objective.kl_coef:g}"
    values = mask.update.get("is_loss_debug/kl")
    if values is not None and float(np.nanmax(np.abs(values))) > 0:
        return f"the terms of the loss have a KL of up to {float(np.nanmax(np.abs(values))):.3g}"
    return ""


def _evidence(found: Found, reading: Reading) -> dict[str, Any]:
    evidence: dict[str, Any] = {
        "unexplained": reading.match.fit.unexplained,
        "tokens": len(found.tokens),
    }
    if np.isfinite(found.nearest):
        evidence["others leave at least"] = found.nearest
    return evidence


def distinct(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def either(names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    shown = names[:SHOWN]
    more = f", or {len(names) - SHOWN} others" if len(names) > SHOWN else ""
    return "; or ".join(shown) + more + " (the same here)"
