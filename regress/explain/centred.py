"""What tokens alone say of their weights: centred advantages of a group sum to 0 under the right ones only."""

from __future__ import annotations

from collections.abc import Iterator

from regress.explain.mask import Mask
from regress.explain.statement import Statement
from regress.explain.terms import Policies


def centred(mask: Mask, known: Policies) -> Iterator[Statement]:
    """Statements on the weights without rewards or advantages."""
    yield from ()
