"""Judgement of one tensor: presence, dtype, shape, and values from its blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from regress.compare.metrics.policy_distances import QUANTITIES, LogRatios, log_ratios
from regress.compare.metrics.striped_measures import Measures, largest, measure, ratio, scaled_residual
from regress.compare.verdicts.tensor_case import Block, Case, Locate, kind
from regress.compare.verdicts.tolerance import Tolerance
from regress.compare.verdicts.verdict import Status, Verdict, Worst, WorstRow
from regress.dump.coordinates import Place
from regress.dump.numpy_arrays import Array, dtype_name, is_float


def judge_tensor(
    actual: Array | None,
    expected: Array | None,
    tolerance: Tolerance,
    *,
    quantity: str,
    name: str,
    place: Place,
    scale: float | None = None,
    dtype: str | None = None,
    locate: Locate | None = None,
) -> Verdict:
    """Judge a tensor, the graver faults first: missing, extra, dtype, shape, non-finite values, values.

    A golden float in place of an integer (or the reverse) is a verdict on the dtype whatever ``dtype`` says. Integers
    and booleans are compared exactly: where they differ the status is ``mask``. NaN and infinities must match by
    position, kind and sign. Equal zeros pass whatever the tolerance, and so do empty tensors, with
    ``count`` 0: whether nothing at all was compared is for the caller to judge.

    Args:
        actual, expected: the two tensors; None where there is none (not both).
        scale: scale of the tolerance; by default the largest absolute value of ``expected``.
        dtype: name of the dtype that ``actual`` must have; by default any, or that of ``expected`` if bytes are
            compared.
        locate: words for a flat index of ``expected``.
    """
    shape = () if expected is None else expected.shape
    case = Case(quantity, name, place, tolerance, locate, shape)
    if actual is None or expected is None:
        return absent(case, actual, expected)
    if (wrong := wrong_dtype(case, actual, expected, dtype)) is not None:
        return wrong
    if actual.shape != expected.shape:
        detail = f"golden {list(expected.shape)}, actual {list(actual.shape)}"
        return case.verdict(Status.SHAPE, detail=detail)
    row = shape[-1] if len(shape) > 1 and shape[-1] > 1 else None
    blocks = (Block(actual, expected, row=row),)
    return judge_values(case, lambda: blocks, is_float(expected.dtype), scale)


def absent(case: Case, actual: Array | None, expected: Array | None) -> Verdict:
    """Return the verdict on a tensor that one side lacks."""
    if expected is not None:
        return case.verdict(
            Status.MISSING, detail=f"golden {_described(expected)}, and nothing of this name was recorded"
        )
    assert actual is not None, "a tensor that neither side has cannot be judged"
    return case.verdict(Status.EXTRA, detail=f"actual {_described(actual)}, and no golden of this name")


def _described(array: Array) -> str:
    return f"{dtype_name(array.dtype)} {list(array.shape)}"


Blocks = Callable[[], Iterable[Block]]
"""Function that yields the blocks of a tensor anew on each call, as they may be too large to be kept."""


def wrong_dtype(case: Case, actual: Array, golden: Array, dtype: str | None = None) -> Verdict | None:
    """Return the verdict on dtypes that cannot be compared.

    Args:
        dtype: name of the dtype that the actual tensor must have; by default any, or the golden one if bytes are
            compared.
    """
    expected = dtype or (dtype_name(golden.dtype) if case.tolerance.bitwise else None)
    found = dtype_name(actual.dtype)
    if (expected is None or expected == found) and is_float(actual.dtype) == is_float(golden.dtype):
        return None
    return case.verdict(Status.DTYPE, detail=f"golden {expected or dtype_name(golden.dtype)}, actual {found}")


def judge_values(
    case: Case,
    blocks: Blocks,
    floats: bool,
    scale: float | None = None,
    seen: list[Measures] | None = None,
) -> Verdict:
    """Judge the values of a tensor from its blocks: floats by their tolerance, other dtypes exactly."""
    if scale is None:
        scale = max((largest(block.golden) for block in blocks()), default=0.0)
    values = _Values(case, scale, _bound(case.tolerance, scale), floats)
    for block in blocks():
        values.add(block)
    if seen is not None:
        seen.append(values.measures)
    return values.verdict(blocks)


def _bound(tolerance: Tolerance, scale: float) -> float:
    if math.isinf(tolerance.relative):  # whatever the scale, even 0
        return math.inf
    return tolerance.relative * scale + tolerance.absolute


class _Values:
    """Running measures of all blocks so far, and the elements to name; no block is kept."""

    measures: Measures

    def __init__(self, case: Case, scale: float, bound: float, floats: bool) -> None:
        self._case, self._scale, self._bound, self._floats = case, scale, bound, floats
        self.measures = Measures()
        self._worst: Worst | None = None
        self._mismatch: Worst | None = None
        self._row: WorstRow | None = None
        self._ratios = LogRatios() if floats and case.quantity in QUANTITIES else None

    def add(self, block: Block) -> None:
        """Measure the next block."""
        case, so_far = self._case, self.measures
        part = measure(block.actual, block.golden, self._bound, bitwise=case.tolerance.bitwise, row=block.row)
        if part.worst is not None and (self._worst is None or part.max_error > so_far.max_error):
            self._worst = case.worst(block, part.worst)
        if part.first_mismatch is not None and self._mismatch is None:
            self._mismatch = case.worst(block, part.first_mismatch)
        row = part.worst_row
        if row is not None and (self._row is None or row.error_l2 > self._row.error_l2):
            self._row = case.worst_row(block, row)
        if self._ratios is not None:
            alike = not part.max_error
            found = LogRatios(part.finite) if alike else log_ratios(block.actual, block.golden)
            self._ratios = self._ratios.then(found)
        self.measures = so_far.then(part)

    def verdict(self, blocks: Blocks) -> Verdict:
        """Return the verdict on all blocks."""
        found, bitwise = self.measures, self._case.tolerance.bitwise
        if self._mismatch is not None:
            at = self._mismatch
            detail = (
                f"golden {kind(at.golden)}, actual {kind(at.actual)} "
                f"({found.mismatched} of {found.count} elements do not match)"
            )
            return self._verdict(Status.NONFINITE, blocks, detail, at, math.inf, found.mismatched)
        multiple = math.inf if bitwise and found.over else ratio(found.max_error, self._bound)
        if not found.over:
            return self._verdict(Status.OK, blocks, "", self._worst, multiple, 0)
        differ = f"{found.over} of {found.count} elements differ{' in their bytes' if bitwise else ''}"
        status = Status.DRIFT if self._floats else Status.MASK
        detail = differ if bitwise or not self._floats else ""
        return self._verdict(status, blocks, detail, self._worst, multiple, found.over)

    def _verdict(
        self, status: Status, blocks: Blocks, detail: str, worst: Worst | None, multiple: float, over: int
    ) -> Verdict:
        found, ratios = self.measures, self._ratios
        figures: dict[str, Any] = {}
        if found.max_error:
            figures = {
                "relative": ratio(found.max_error, self._scale),
                "relative_l2": found.relative_l2,
                "mean_error": found.mean_error,
                "rmse": found.rmse,
                "max_relative": found.max_relative,
            }
        return self._case.verdict(
            status,
            detail=detail,
            worst=worst,
            multiple=multiple,
            max_error=found.max_error,
            scale=self._scale,
            over=over,
            count=found.count,
            tolerance=self._bound,
            max_ulp=found.max_ulp,
            alpha=found.alpha,
            residual=self._residual(blocks),
            quantiles=found.quantiles,
            worst_row=self._row,
            distances=None if ratios is None else ratios.distances(),
            **figures,
        )

    def _residual(self, blocks: Blocks) -> float | None:
        """Return the part that scaling does not explain; values are read again where it explains nearly everything."""
        found, alpha, residual = self.measures, self.measures.alpha, self.measures.residual
        if found.over and alpha is not None and residual is not None and residual < 1e-6 * found.relative_l2:
            return scaled_residual(((block.actual, block.golden) for block in blocks()), alpha)
        return residual
