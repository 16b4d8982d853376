"""One tensor under judgement: its blocks, the fields common to all verdicts on it, and names for its elements."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regress.compare.metrics.error_measures import RowNorms
from regress.compare.metrics.striped_measures import ratio
from regress.compare.metrics.ulps import ulps_apart
from regress.compare.verdicts.tolerance import Tolerance
from regress.compare.verdicts.verdict import Status, Verdict, Worst, WorstRow
from regress.dump.coordinates import Place
from regress.dump.numpy_arrays import Array, is_float


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


Locate = Callable[[int], str]
"""Words for a flat (C order) index of a local tensor."""


@dataclass(frozen=True)
class Case:
    """Known facts of a tensor before its values are examined.

    Attributes:
        words: canonical coordinates of a flat index in the actual tensor; by default its own index.
        shape: shape of the actual tensor.
    """

    quantity: str
    name: str
    place: Place
    tolerance: Tolerance
    words: Locate | None
    shape: tuple[int, ...]

    def verdict(self, status: Status, **found: Any) -> Verdict:
        """Return a verdict on this tensor."""
        tolerance = self.tolerance
        return Verdict(
            status,
            self.quantity,
            self.name,
            self.place,
            basis=tolerance.basis,
            reason=tolerance.reason,
            **found,
        )

    def worst(self, block: Block, element: int) -> Worst:
        """Describe an element of a block."""
        a, g = _element(block.actual, element), _element(block.golden, element)
        golden, actual = float(g), float(a)
        error = abs(actual - golden) if is_float(a.dtype) else float(abs(int(a) - int(g)))
        flat = block.index(element)
        return Worst(self._index(flat), self._words(flat), golden, actual, error, ulps_apart(a, g))

    def worst_row(self, block: Block, row: RowNorms) -> WorstRow:
        """Describe a row of a block."""
        assert block.row is not None
        first = block.index(row.index * block.row)
        relative = ratio(row.error_l2, row.golden_l2)
        return WorstRow(self._index(first)[:-1], self._words(first), row.error_l2, relative)

    def uncompared(self, verdict: Verdict, flat: int, value: float, detail: str) -> Verdict:
        """Return the verdict on a non-finite value where nothing is compared."""
        worst = Worst(self._index(flat), self._words(flat), 0.0, value, math.inf)
        return replace(verdict, status=Status.NONFINITE, detail=detail, worst=worst, multiple=math.inf)

    def _words(self, flat: int) -> str:
        return self.words(flat) if self.words is not None else element(flat, self.shape, self.name)

    def _index(self, flat: int) -> tuple[int, ...]:
        return unravelled(flat, self.shape)


def element(index: int, shape: tuple[int, ...], name: str) -> str:
    """Return text such as ``element [3, 5] of NAME``; just the name for a tensor with one value."""
    if not shape:
        return name
    return f"element {[*unravelled(index, shape)]} of {name}"


def unravelled(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index of an element in each dimension: `numpy.unravel_index` of one number, ten times as fast."""
    found = []
    for size in reversed(shape):
        index, rest = divmod(index, size)
        found.append(rest)
    return tuple(reversed(found))


def kind(value: float) -> str:
    """Return ``NaN``, ``infinity``, ``-infinity`` or ``finite``."""
    if math.isnan(value):
        return "NaN"
    return "finite" if math.isfinite(value) else "infinity" if value > 0 else "-infinity"


def _element(array: Array, index: int) -> Array:
    """Return an element as an array without dimensions, without copying the array, whatever its strides."""
    return array.flat[index : index + 1].reshape(())
