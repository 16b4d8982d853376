"""The verdict on corresponding elements that come block by block."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from regress.compare.metrics import Measures, Row, largest, measure, ratio
from regress.compare.pieces import Block
from regress.compare.tensor import Locate
from regress.compare.tolerance import Tolerance
from regress.compare.ulps import ulps_apart
from regress.compare.verdict import Place, Status, Verdict, Worst, WorstRow
from regress.dump.arrays import Array, dtype_name, is_float


@dataclass(frozen=True)
class Case:
    """What every verdict on a tensor repeats.

    Attributes:
        words: canonical coordinates of a flat index in the actual tensor.
        shape: of the actual tensor.
    """

    quantity: str
    name: str
    place: Place
    tolerance: Tolerance
    words: Locate
    shape: tuple[int, ...]

    def verdict(self, status: Status, **found: Any) -> Verdict:
        """A verdict on this tensor."""
        known: dict[str, Any] = {"basis": self.tolerance.basis, "reason": self.tolerance.reason}
        return Verdict(status, self.quantity, self.name, self.place, **known, **found)

    def worst(self, block: Block, element: int) -> Worst:
        """An element of a block."""
        a, g = block.actual[element : element + 1], block.golden[element : element + 1]
        flat = block.index(element)
        golden, actual = float(g[0]), float(a[0])
        error = abs(actual - golden) if is_float(a.dtype) else float(abs(int(a[0]) - int(g[0])))
        ulp = ulps_apart(a.reshape(()), g.reshape(()))
        return Worst(self._index(flat), self.words(flat), golden, actual, error, ulp)

    def worst_row(self, block: Block, row: Row) -> WorstRow:
        """A row of a block."""
        assert block.row is not None
        first = block.index(row.index * block.row)
        return WorstRow(
            self._index(first)[:-1], self.words(first), row.error_l2, ratio(row.error_l2, row.golden_l2)
        )

    def padding(self, verdict: Verdict, flat: int, value: float) -> Verdict:
        """A value that is not finite where nothing is compared."""
        worst = Worst(self._index(flat), self.words(flat), 0.0, value, math.inf)
        detail = f"{_kind(value)} where no loss token lies, and nothing of the kind in the golden dump"
        return replace(verdict, status=Status.NONFINITE, detail=detail, worst=worst, multiple=math.inf)

    def _index(self, flat: int) -> tuple[int, ...]:
        return tuple(int(i) for i in np.unravel_index(flat, self.shape)) if self.shape else ()


def judge_blocks(
    case: Case,
    blocks: Callable[[], Iterable[Block]],
    actual: Array,
    golden: Array,
    scale: float | None,
) -> Verdict:
    """Judge a tensor from the blocks of its elements.

    The rules are those of `regress.compare.tensor.judge_tensor`, but that floats of different dtypes may be compared:
    the tolerance is that of the coarser one.

    Args:
        blocks: makes the blocks, which are too large to be kept.
        actual, golden: arrays of the two dtypes.
        scale: of the tolerance; by default the largest golden value of the blocks.
    """
    tolerance = case.tolerance
    differ = dtype_name(actual.dtype) != dtype_name(golden.dtype)
    if is_float(actual.dtype) != is_float(golden.dtype) or (tolerance.bitwise and differ):
        detail = f"golden {dtype_name(golden.dtype)}, actual {dtype_name(actual.dtype)}"
        return case.verdict(Status.DTYPE, detail=detail)
    if scale is None:
        scale = max((largest(block.golden) for block in blocks()), default=0.0)
    bound = math.inf if math.isinf(tolerance.relative) else tolerance.relative * scale + tolerance.absolute
    return _verdict(_Found(case).over(blocks(), bound), scale, bound)


@dataclass
class _Found:
    """Measures of all blocks, and what is named; of the blocks themselves none is kept."""

    case: Case
    measures: Measures = field(default_factory=Measures)
    worst: Worst | None = None
    mismatch: Worst | None = None
    row: WorstRow | None = None
    exact: bool = False

    def over(self, blocks: Iterable[Block], bound: float) -> _Found:
        """These and the measures of some blocks."""
        bitwise, highest = self.case.tolerance.bitwise, 0.0
        for block in blocks:
            part = measure(block.actual, block.golden, bound, bitwise=bitwise, row=block.row)
            if part.worst is not None and (self.worst is None or part.max_error > self.measures.max_error):
                self.worst = self.case.worst(block, part.worst)
            if part.first_mismatch is not None and self.mismatch is None:
                self.mismatch = self.case.worst(block, part.first_mismatch)
            row = part.worst_row
            if row is not None and (self.row is None or row.error_l2 > highest):
                self.row, highest = self.case.worst_row(block, row), row.error_l2
            self.measures = self.measures.then(part)
            self.exact = not is_float(block.golden.dtype)
        return self


def _verdict(found: _Found, scale: float, bound: float) -> Verdict:
    case, measures = found.case, found.measures
    bitwise = case.tolerance.bitwise
    multiple = math.inf if bitwise and measures.over else ratio(measures.max_error, bound)
    figures = {"multiple": multiple, "tolerance": bound, **_figures(found, scale)}
    if found.mismatch is not None:
        at = found.mismatch
        detail = (
            f"golden {_kind(at.golden)}, actual {_kind(at.actual)} "
            f"({measures.mismatched} of {measures.count} elements do not match)"
        )
        wrong = {**figures, "multiple": math.inf, "over": measures.mismatched}
        return case.verdict(Status.NONFINITE, detail=detail, worst=at, **wrong)
    if not measures.over:
        return case.verdict(Status.OK, worst=found.worst, **figures)
    detail = f"{measures.over} of {measures.count} elements differ{' in their bytes' if bitwise else ''}"
    status = Status.MASK if found.exact else Status.DRIFT
    told = detail if found.exact or bitwise else ""
    return case.verdict(status, detail=told, worst=found.worst, **figures)


def _figures(found: _Found, scale: float) -> dict[str, Any]:
    """What a verdict says of the errors, whatever was tolerated."""
    measures = found.measures
    return {
        "max_error": measures.max_error,
        "relative": ratio(measures.max_error, scale),
        "relative_l2": measures.relative_l2,
        "scale": scale,
        "over": measures.over,
        "count": measures.count,
        "mean_error": measures.mean_error,
        "rmse": measures.rmse,
        "max_relative": measures.max_relative,
        "max_ulp": measures.max_ulp,
        "alpha": measures.alpha,
        "residual": measures.residual,
        "quantiles": measures.quantiles,
        "worst_row": found.row,
    }


def _kind(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "finite" if math.isfinite(value) else "infinity" if value > 0 else "-infinity"
