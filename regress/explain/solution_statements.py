"""Statements read from the solution itself: temperature, other dependences of the loss, and the mask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from regress.explain.loss_tokens import Mask
from regress.explain.statement import Statement
from regress.explain.update_tokens import Bools

EXPLAINED = 2e-2
"""Unexplained part from which a loss depends on more than log-probs and entropies (bfloat16 leaves 3e-3)."""
EXPLAINED_FINE = 2e-4
"""The same where everything is computed in float32 or better, which leaves 1e-6."""


def temperature(mask: Mask) -> Iterator[Statement]:
    """Yield the temperature that logits are divided by, found or given, and a departure if the sampler used another."""
    update, temperatures = mask.update, mask.update.temperatures
    if not temperatures:
        return
    evidence: dict[str, Any] = {"microbatches": len(update.meta)}
    if update.temperature_errors:
        evidence["error at most"] = max(update.temperature_errors)
    value = update.temperature
    if value is None:
        text = f"logits are divided by different temperatures, {min(temperatures):.6g} to {max(temperatures):.6g}"
        yield Statement("temperature", text, tuple(temperatures), evidence, departure=True)
        return
    yield Statement("temperature", f"logits are divided by {value:.6g}", (value,), evidence)
    sampled = {t.temperature for t in update.trajectories if t.temperature}
    if len(sampled) == 1:
        other = float(next(iter(sampled)))
        if abs(other - value) > update.nearby(other):
            text = f"completions were sampled at {other:.6g}, but the loss takes log-probs at {value:.6g}"
            yield Statement("temperature", text, (value, other), evidence, departure=True)


def dependence(mask: Mask) -> Iterator[Statement]:
    """Yield a statement on the tokens whose log-probs and entropies explain the loss: the next ones, or others."""
    residual = mask.update.get("token_gradient/token_residual")
    live = mask.known & ((mask.g != 0) | (mask.h != 0))
    if residual is None or not live.any():
        return
    noise = max(mask.noise, float(np.nanmedian(residual[live])))
    evidence: dict[str, Any] = {"unexplained": noise, "tokens": int(live.sum())}
    limit = EXPLAINED_FINE if mask.update.fine else EXPLAINED
    if noise < limit:
        text = "it depends on the policy through log-probs and entropies of the next tokens"
        yield Statement("loss", text, (), evidence)
        return
    shifts = _shifts(mask)
    if shifts:
        evidence["unexplained by shift of the targets"] = shifts
        best = min(shifts, key=shifts.__getitem__)
        if best != "0" and shifts[best] < min(limit, noise / 10):
            text = f"it takes the log-probs of other targets: those shifted by {int(best):+d} tokens"
            yield Statement("targets", text, (int(best),), evidence, departure=True)
            return
    text = (
        "log-probs and entropies of the next tokens do not explain its gradient: it depends on something else, or its "
        "targets, temperature or head are not those of the recording"
    )
    yield Statement("loss", text, (), evidence, departure=True)


def _shifts(mask: Mask) -> dict[str, float]:
    """Return the largest unexplained part over microbatches, by shift of the targets; where the recording tried any."""
    found: dict[str, float] = {}
    for meta in mask.update.meta:
        tried: Any = meta.get("target_residuals") or {}
        for shift, left in tried.items():
            found[str(shift)] = max(found.get(str(shift), 0.0), float(left))
    return found


def masks(mask: Mask, *, selects: bool = True, clips: bool = False) -> Iterator[Statement]:
    """Yield the tokens that the loss trains on, and where they are not the expected ones.

    Args:
        selects: False if the loss should leave no token out because of how it compares with others.
        clips: True if tokens without a gradient may be clipped, and nothing tells which.
    """
    strays = mask.strays
    if strays:
        text = f"{strays} positions that predict no token of their sample have a gradient, beside the tokens that do"
        yield Statement("mask", text, ("beyond the end",), {"positions": strays}, departure=True)
    live = int(mask.policy.sum())
    if not live:
        return
    samples = int(mask.speaking.sum())
    silent = len(mask.speaking) - samples
    evidence: dict[str, Any] = {"tokens with a gradient": live, "samples with a gradient": samples}
    if silent:
        evidence["samples without"] = silent
    missing = mask.unexplained
    if mask.expected is None:
        text = f"{live} tokens of {samples} samples have a gradient"
        yield Statement("mask", text, (live,), evidence)
        return
    if mask.left_out is not None and not missing.any() and not mask.extra.any():
        text = f"{mask.source} {_where(mask, mask.left_out, 'without')}, as a loss that {mask.selection}"
        evidence["left out"] = _listed(mask, mask.left_out)
        yield Statement("mask", text, ("as expected", mask.selection), evidence, departure=not selects)
        return
    if not missing.any() and not mask.extra.any():
        if strays:
            return  # it is not exactly the expected one
        text = f"exactly {mask.source}, in every sample that has a gradient"
        if mask.clipped is not None and mask.clipped.any():
            evidence["clipped tokens"] = int(mask.clipped.sum())
        yield Statement("mask", text, ("as expected",), evidence)
        return
    if clips and missing.any() and not mask.extra.any():
        text = f"{live} tokens have a gradient; {int(missing.sum())} others of {mask.source} have none, or are clipped"
        yield Statement("mask", text, (live,), evidence)
        return
    missing = np.zeros_like(missing) if clips else missing
    parts = [_where(mask, missing, "lacks"), _where(mask, mask.extra, "has in addition")]
    evidence |= {"missing": _listed(mask, missing), "additional": _listed(mask, mask.extra)}
    text = f"not {mask.source}: it " + " and ".join(part for part in parts if part)
    values = tuple(part for part in parts if part)
    yield Statement("mask", text, values, evidence, departure=True)


def _where(mask: Mask, tokens: Bools, verb: str) -> str:
    """Return the number of tokens, and what they have in common, in words."""
    if not tokens.any() or mask.expected is None:
        return ""
    sample, position = mask.update.sample[tokens], mask.update.position[tokens]
    size = len(mask.update.frame.samples)
    first, last = np.full(size, np.iinfo(np.int64).max), np.full(size, -1)
    own, at = mask.update.sample[mask.expected], mask.update.position[mask.expected]
    np.minimum.at(first, own, at)
    np.maximum.at(last, own, at)
    kinds = {
        "the last token of each": (position == last[sample]).all(),
        "the first token of each": (position == first[sample]).all(),
        "the token before the first of each": (position == first[sample] - 1).all(),
        "the token after the last of each": (position == last[sample] + 1).all(),
    }
    which = next((f", {kind}" for kind, holds in kinds.items() if holds), "")
    count = int(tokens.sum())
    return f"{verb} {count} token{'s' if count > 1 else ''} in {len(np.unique(sample))} samples{which}"


def _listed(mask: Mask, tokens: Bools, limit: int = 5) -> list[str]:
    found = [mask.update.frame.locate(int(index)) for index in np.flatnonzero(tokens)[:limit]]
    return [f"{group}/{run} position {position}" for (group, run), position in found]
