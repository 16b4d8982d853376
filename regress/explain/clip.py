"""Clip range of the ratio: each bound lies between the last token with a gradient and the first without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from regress.explain.mask import Mask
from regress.explain.readings import Reading
from regress.explain.search import Found, clipped_tokens
from regress.explain.statement import Statement
from regress.explain.terms import Policies
from regress.explain.update import Bools, Floats


def clips(found: Found, readings: list[Reading], mask: Mask, known: Policies) -> Iterator[Statement]:
    """Yield statements on the clip range, from the ratios of tokens with and without a policy term."""
    best = readings[0]
    if not best.match.factor.clips or any(r.match.factor.name != best.match.factor.name for r in readings):
        return
    used = np.zeros(mask.update.frame.size, bool)
    used[found.tokens] = True
    ratio, advantage = best.match.factor.clipped, best.match.advantages.values
    low_cap, high_cap = best.match.fit.caps
    if low_cap is not None or high_cap is not None:
        bounds = (("at most", high_cap), ("at least", low_cap))
        parts = [f"{word} {cap:.6g}" for word, cap in bounds if cap is not None]
        text = f"the ratio is held at {' and '.join(parts)}, and tokens beyond keep their gradient (CISPO)"
        yield Statement(
            "clip", text, ("capped", low_cap, high_cap), {"unexplained": best.match.fit.unexplained}
        )
        return
    gone = clipped_tokens(best.match, found, mask.update.frame.size)
    kept = used & ~gone & (advantage != 0)
    up, down = advantage > 0, advantage < 0
    wrong = _wrong(ratio, gone, up, down)
    if wrong:
        text = f"the wrong side is clipped: {wrong}"
        yield Statement("clip", text, ("sides",), _counts(kept, gone, up, down), departure=True)
        return
    high, low = _upper(ratio, kept & up, gone & up), _lower(ratio, kept & down, gone & down)
    if not gone.any():
        text = "no token of this update is clipped"
    elif high is None or low is None:
        return
    else:
        text = f"the ratio is clipped {_shown(low, 'below')} and {_shown(high, 'above')}"
    values: tuple[Any, ...] = (low, high)
    yield Statement("clip", text, values, _counts(kept, gone, up, down))


def _upper(ratio: Floats, kept: Bools, gone: Bools) -> tuple[float, float] | None:
    """Return the ratios between which the upper bound lies; None if tokens are clipped for another reason."""
    last = float(ratio[kept].max(initial=0.0))
    first = float(ratio[gone].min(initial=np.inf))
    return (last, first) if last <= first else None


def _lower(ratio: Floats, kept: Bools, gone: Bools) -> tuple[float, float] | None:
    last = float(ratio[kept].min(initial=np.inf))
    above = gone & (ratio > float(ratio[kept].max(initial=0.0)))  # a second bound: delta, or a dual clip
    first = float(ratio[gone & ~above].max(initial=0.0))
    return (first, last) if first <= last else None


def _wrong(ratio: Floats, gone: Bools, up: Bools, down: Bools) -> str:
    """Return evidence that the larger loss is not taken: tokens of positive advantage are clipped at small ratios.

    High ratios of tokens with a negative advantage prove nothing: a second bound (delta, dual clip) clips them, too.
    """
    if not (gone & up).any() or not bool((ratio[gone & up] < 1).all()):
        return ""
    words = f"{int((gone & up).sum())} tokens of positive advantage have no gradient below 1"
    if (gone & down).any() and bool((ratio[gone & down] > 1).all()):
        words += f" and {int((gone & down).sum())} tokens of negative advantage have none above 1"
    return words


def _shown(bounds: tuple[float, float], side: str) -> str:
    low, high = bounds
    if side == "above":
        return f"above a bound in ({low:.6g}, {high:.6g}]" if np.isfinite(high) else f"not below {low:.6g}"
    if low > 0:
        return f"below a bound in [{low:.6g}, {high:.6g})"
    return f"not above {high:.6g}" if np.isfinite(high) else "below a bound that no token shows"


def _counts(kept: Bools, gone: Bools, up: Bools, down: Bools) -> dict[str, Any]:
    return {
        "with a gradient": int(kept.sum()),
        "clipped of positive advantage": int((gone & up).sum()),
        "clipped of negative advantage": int((gone & down).sum()),
    }
