"""Suggestions for mistyped names."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a phrase that names the closest known names, or all of them if none is close."""
    choices = sorted(known)
    close = get_close_matches(name, choices, n=3, cutoff=0.6)
    if close:
        return "did you mean " + " or ".join(repr(choice) for choice in close) + "?"
    return "known are " + ", ".join(choices)
