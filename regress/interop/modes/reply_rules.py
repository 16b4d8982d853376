"""Rules for what the service computes from its inputs, and for the loss that the client reports."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from regress.interop.modes.discrepancy import SERVICE, Discrepancy, some
from regress.interop.modes.mode_rows import OLD, Floats, ModeRow
from regress.interop.modes.step_context import StepContext

_CLOSE = 1e-4


def replies(context: StepContext) -> Iterator[Discrepancy]:
    """Yield losses that are reported otherwise than they were computed, and clips that are left out."""
    yield from _loss(context)
    yield from _clip(context)


def _loss(context: StepContext) -> Iterator[Discrepancy]:
    loss = None if context.client is None else context.client.metrics.get("loss")
    if context.client is None or not isinstance(loss, int | float) or isinstance(loss, bool):
        return
    sums = [value for one in context.passes if isinstance(value := one.metrics.get("loss:sum"), int | float)]
    known = {
        "the metrics themselves have loss:sum": context.client.metrics.get("loss:sum"),
        "the service's replies have loss:sum": math.fsum(sums)
        if len(sums) == len(context.passes) > 0
        else None,
        "the service's losses add up to": context.losses.get(SERVICE, {}).get("loss"),
    }
    there = {words: float(value) for words, value in known.items() if isinstance(value, int | float)}
    loss = float(loss)
    others = {words: value for words, value in there.items() if math.isfinite(value) and value != 0.0}
    if loss == 0.0 and others and len(others) == len(there):
        yield Discrepancy(
            "loss-reported-as-zero",
            "the client reports a loss of 0.0 that the service never sent: it looks for metrics under the key loss, "
            "and takes 0.0 where there is only loss:sum",
            tuple(f"{words} {value:.9g}" for words, value in others.items()),
            ("metrics",),
        )
        return
    count = len(context.passes)
    mean = others.get("the service's replies have loss:sum", math.nan) / max(count, 1)
    if count > 1 and math.isclose(loss, mean, rel_tol=_CLOSE):
        yield Discrepancy(
            "loss-averaged-over-requests",
            "the client reports the mean of the losses of its requests, which are parts of a sum",
            (f"{loss:.9g} is 1/{count} of the {mean * count:.9g} that {count} requests add up to",),
            ("metrics",),
        )


def _clip(context: StepContext) -> Iterator[Discrepancy]:
    """Yield a loss of the service that is not clipped, although its name or the trainer's says so."""
    passes = context.passes
    if not passes or any(one.loss != "ppo" for one in passes) or not context.service:
        return
    low, high = (passes[0].config.get(f"clip_{name}_threshold") for name in ("low", "high"))
    bounds = (
        float(low) if isinstance(low, int | float) else 0.8,
        float(high) if isinstance(high, int | float) else 1.2,
    )
    names, count = [], 0
    for row in context.service:
        found = _terms(row)
        if found is None:
            continue
        ratio, adv, loss = found
        plain = -ratio * adv
        clipped = -np.minimum(ratio * adv, np.clip(ratio, *bounds) * adv)
        bound = _CLOSE * np.maximum(np.abs(plain), 1e-12)
        binding = np.abs(plain - clipped) > 10 * bound
        if (binding & (np.abs(loss - plain) > bound)).any():
            return
        if binding.any():
            names.append(row.name)
            count += int(binding.sum())
    if names:
        yield Discrepancy(
            "ratio-clip-lost",
            "the ratio is not clipped, although the loss is ppo",
            (
                f"{some(names, 'datum')}: {count} tokens outside of {bounds[0]:g} to {bounds[1]:g} have -ratio * "
                "advantage",
            ),
            ("token_loss", "policy_loss", "loss", "gradient"),
        )


def _terms(row: ModeRow) -> tuple[Floats, Floats, Floats] | None:
    values: Sequence[Floats | None] = [row.values.get(name) for name in ("ratio", "advantages", "loss")]
    mask = row.mask
    if mask is None or OLD not in row.values:
        return None
    known = [array[mask] for array in values if array is not None and array.size == mask.size]
    if len(known) < 3:
        return None
    return known[0], known[1], known[2]
