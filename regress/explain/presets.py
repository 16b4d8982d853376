"""Which named objectives do the same as the trainer, and where it departs from the nearest."""

from __future__ import annotations

from collections.abc import Iterator

from regress.explain.mask import Mask
from regress.explain.readings import Reading
from regress.explain.search import Found
from regress.explain.statement import Statement
from regress.explain.terms import Policies


def agreements(mask: Mask, known: Policies, readings: list[Reading], found: Found) -> Iterator[Statement]:
    """Statements on presets."""
    yield from ()
