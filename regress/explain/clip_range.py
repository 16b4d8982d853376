"""Clip range of the ratio: each bound lies between the last token with a gradient and the first without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from regress.explain.denominator_readings import Reading
from regress.explain.hypothesis_search import Found, clipped_tokens
from regress.explain.loss_statements import either
from regress.explain.loss_tokens import Mask
from regress.explain.policy_log_probs import Policies
from regress.explain.selection_hypotheses import drawable
from regress.explain.statement import Statement
from regress.explain.trust_regions import RATIO, Region, regions
from regress.explain.update_tokens import Bools, Floats

Bounds = tuple[tuple[float, float], tuple[float, float]]
"""Interval that holds the lower bound, and the one that holds the upper bound."""


def clips(found: Found, readings: list[Reading], mask: Mask, known: Policies) -> Iterator[Statement]:
    """Yield statements on the clip range, from the ratios of tokens with and without a policy term."""
    best = readings[0]
    if not all(_same(best, reading) for reading in readings):
        return
    used = np.zeros(mask.update.frame.size, bool)
    used[found.tokens] = True
    ratio, advantage = best.match.factor.clipped, best.match.advantages.values
    gone = clipped_tokens(best.match, found, mask.update.frame.size)
    everywhere = np.arange(gone.size)
    gone |= used & (best.match.factor.of(advantage, everywhere) == 0)  # of a loss that clips within its ratio
    kept = used & ~gone & (advantage != 0)
    if any(cap is not None for cap in best.match.fit.caps):
        yield _capped(best)
        if not gone.any():
            return
    up, down = advantage > 0, advantage < 0
    counts = _counts(kept, gone, up, down)
    wrong = _wrong(ratio, kept, gone, up, down)
    if wrong:
        text = f"the wrong side is clipped: {wrong}"
        yield Statement("clip", text, ("sides",), counts, departure=True)
        return
    if not gone.any():
        values: tuple[Any, ...] = _upper_and_lower(ratio, kept, gone, up, down)
        yield Statement("clip", "no token of this update is clipped", values, counts)
        return
    drawn = drawable(mask, known, advantage, gone)
    yield from _bounded(best, known, (kept, gone, up, down), drawn)


def _capped(best: Reading) -> Statement:
    low, high = best.match.fit.caps
    bounds = (("at most", high), ("at least", low))
    parts = [f"{word} {cap:.6g}" for word, cap in bounds if cap is not None]
    text = f"the ratio is held at {' and '.join(parts)}, and tokens beyond keep their gradient"
    return Statement("clip", text, ("capped", low, high), {"unexplained": best.match.fit.unexplained})


def _same(best: Reading, other: Reading) -> bool:
    """Return True if both readings may clip tokens, and compare the same ratio with the range."""
    ours, theirs = best.match.factor, other.match.factor
    return (
        ours.clips
        and theirs.clips
        and (ours is theirs or np.allclose(ours.clipped, theirs.clipped, rtol=1e-9))
    )


def _bounded(
    best: Reading, known: Policies, sides: tuple[Bools, Bools, Bools, Bools], drawn: bool
) -> Iterator[Statement]:
    """Yield the bounds of every quantity that separates tokens with a gradient from those without.

    Args:
        drawn: True if Clip-Cov may have drawn all of the latter.
    """
    kept, gone, up, down = sides
    factor = best.match.factor
    found: dict[str, Bounds] = {}
    candidates = [Region(RATIO, factor.clipped)]
    if (
        factor.fields.get("importance_level") == "token"
    ):  # distances of tokens take the place of their ratios only
        candidates += [region for region in regions(known) if region.name != RATIO]
    for region in candidates:
        low, high = _upper_and_lower(region.values, kept, gone, up, down, double=region.name == RATIO)
        if low is not None and high is not None:
            found[region.name] = low, high
    if not found:
        return
    parts = [
        f"{name} is clipped {_shown(low, 'below')} and {_shown(high, 'above')}"
        for name, (low, high) in found.items()
    ]
    if drawn:
        parts.append("the loss draws the tokens without a gradient by covariance (Clip-Cov)")
    counts = _counts(kept, gone, up, down)
    if list(found) != [RATIO]:
        counts |= {"bounds": {name: [list(low), list(high)] for name, (low, high) in found.items()}}
    values: tuple[Any, ...] = found.get(RATIO) or ("region", *found)
    yield Statement("clip", either(parts), values, counts)


def _upper_and_lower(
    ratio: Floats, kept: Bools, gone: Bools, up: Bools, down: Bools, *, double: bool = True
) -> tuple[tuple[float, float] | None, tuple[float, float] | None]:
    return _lower(ratio, kept & down, gone & down, double), _upper(ratio, kept & up, gone & up)


def _upper(ratio: Floats, kept: Bools, gone: Bools) -> tuple[float, float] | None:
    """Return the ratios between which the upper bound lies; None if tokens are clipped for another reason."""
    last = float(ratio[kept].max(initial=0.0))
    first = float(ratio[gone].min(initial=np.inf))
    return (last, first) if last <= first else None


def _lower(ratio: Floats, kept: Bools, gone: Bools, double: bool) -> tuple[float, float] | None:
    least = 0.0 if double else -np.inf
    last = float(ratio[kept].min(initial=np.inf))
    # of a ratio there may be a second bound: delta, or a dual clip
    above = gone & (ratio > float(ratio[kept].max(initial=0.0))) if double else np.zeros_like(gone)
    first = float(ratio[gone & ~above].max(initial=least))
    return (first, last) if first <= last else None


def _wrong(ratio: Floats, kept: Bools, gone: Bools, up: Bools, down: Bools) -> str:
    """Return evidence that the larger loss is not taken: tokens of positive advantage are clipped at small ratios.

    All of them have to lie below those that are kept. High ratios of tokens with a negative advantage prove nothing: a
    second bound (delta, dual clip) clips them, too.
    """
    last = min(1.0, float(ratio[kept & up].min(initial=np.inf)))
    if not (gone & up).any() or not bool((ratio[gone & up] < last).all()):
        return ""
    words = f"{int((gone & up).sum())} tokens of positive advantage have no gradient below 1"
    if (gone & down).any() and bool((ratio[gone & down] > 1).all()):
        words += f" and {int((gone & down).sum())} tokens of negative advantage have none above 1"
    return words


def _shown(bounds: tuple[float, float], side: str) -> str:
    low, high = bounds
    if side == "above":
        return f"above a bound in ({low:.6g}, {high:.6g}]" if np.isfinite(high) else f"not below {low:.6g}"
    if low > 0 or (low < 0 and np.isfinite(low)):
        return f"below a bound in [{low:.6g}, {high:.6g})"
    return f"not above {high:.6g}" if np.isfinite(high) else "below a bound that no token shows"


def _counts(kept: Bools, gone: Bools, up: Bools, down: Bools) -> dict[str, Any]:
    return {
        "with a gradient": int(kept.sum()),
        "clipped of positive advantage": int((gone & up).sum()),
        "clipped of negative advantage": int((gone & down).sum()),
    }
