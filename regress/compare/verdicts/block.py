"""Corresponding elements of two tensors that are compared together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from regress.dump.arrays import Array


@dataclass(frozen=True, eq=False)
class Block:
    """Elements of both sides, in arrays of one shape.

    Attributes:
        start: flat index in the actual tensor of the first element, if they follow one another there; otherwise, of
            each run of ``width`` elements, which multiple of ``width`` it starts at.
        row: elements of a row, where the block consists of whole rows of the last dimension.
    """

    actual: Array
    golden: Array
    start: NDArray[np.int64] | int = 0
    row: int | None = None
    width: int = 1

    def index(self, element: int) -> int:
        """Return the flat index in the actual tensor of an element."""
        if isinstance(self.start, int):
            return self.start + element
        run, rest = divmod(element, self.width)
        return int(self.start[run]) * self.width + rest

    @property
    def places(self) -> NDArray[np.int64] | slice:
        """Flat indices in the actual tensor of all elements."""
        if isinstance(self.start, int):
            return slice(self.start, self.start + self.actual.size)
        return (self.start[:, None] * self.width + np.arange(self.width)).reshape(-1)
