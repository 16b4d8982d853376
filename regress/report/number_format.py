"""Numbers formatted for readers of a report."""

from __future__ import annotations

import math


def short(value: float) -> str:
    """Format a number with three digits: ``0.0123``, ``1.23e-07``, ``inf``."""
    return f"{value:.3g}"


def pair(golden: float, actual: float) -> tuple[str, str]:
    """Format two values with as few digits as tell them apart, at least six."""
    for digits in (6, 9, 12, 17):
        texts = f"{golden:.{digits}g}", f"{actual:.{digits}g}"
        if texts[0] != texts[1]:
            break
    return texts


def multiple(value: float) -> str:
    """Format an error in multiples of its tolerance."""
    return "nothing is tolerated" if math.isinf(value) else f"{short(value)} x tolerance"


def plural(count: int, word: str) -> str:
    """Return ``1 element``, ``3 elements``, ``3 quantities``."""
    if count == 1:
        return f"{count} {word}"
    return f"{count} {word[:-1]}ies" if word.endswith("ty") else f"{count} {word}s"
