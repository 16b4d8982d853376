"""The judgement of one tensor: is it there, is it of the right kind, and is every value where it should be?"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regress.compare.affected import Affected, beyond
from regress.compare.distances import QUANTITIES, policy_distances
from regress.compare.metrics import Measures, Row, largest, measure, nonfinite, ratio, scaled_residual
from regress.compare.tolerance import Tolerance
from regress.compare.ulps import ulps_apart
from regress.compare.verdict import Place, Status, Verdict, Worst, WorstRow
from regress.dump.arrays import Array, dtype_name, is_float

Locate = Callable[[int], str]
"""Words for a flat (C order) index of a local tensor."""

Affect = Callable[[Array, Array, NDArray[np.bool_], NDArray[np.bool_] | None, float], Affected | None]
"""What of a failing tensor is affected, see `regress.compare.surroundings.Surroundings.affected`."""


def judge_tensor(
    actual: Array | None,
    expected: Array | None,
    tolerance: Tolerance,
    *,
    quantity: str,
    name: str,
    place: Place,
    mask: NDArray[np.bool_] | None = None,
    scale: float | None = None,
    dtype: str | None = None,
    locate: Locate | None = None,
    affect: Affect | None = None,
) -> Verdict:
    """Judge a tensor, the graver faults first: missing, extra, dtype, shape, non-finite values, values.

    A golden float in place of an integer (or the reverse) is a verdict on the dtype whatever ``dtype`` says. Integers
    and booleans are compared exactly: where they differ the status is ``mask``. NaN and infinities must match by
    position, kind and sign; a non-finite value outside of ``mask`` whose golden value is finite is a fault too,
    while finite values there are not looked at. Equal zeros pass whatever the tolerance, and so do empty tensors, with
    ``count`` 0: whether nothing at all was compared is for the caller to judge.

    Args:
        actual, expected: the two tensors; None where there is none (not both).
        mask: of the leading dimensions of ``expected``; only elements where it holds are compared.
        scale: of the tolerance; by default the largest absolute value of ``expected`` inside the mask.
        dtype: name of the dtype that ``actual`` must have; by default any, or that of ``expected`` if bytes are
            compared.
        locate: words for a flat index of ``expected``.
        affect: finds which of the elements beyond the tolerance have what in common; asked if there are any.
    """
    case = _Case(quantity, name, place, tolerance, locate)
    if actual is None or expected is None:
        return _absent(case, actual, expected)
    wanted = dtype or (dtype_name(expected.dtype) if tolerance.bitwise else None)
    found = dtype_name(actual.dtype)
    if (wanted is not None and wanted != found) or is_float(actual.dtype) != is_float(expected.dtype):
        return case.verdict(
            Status.DTYPE, detail=f"golden {wanted or dtype_name(expected.dtype)}, actual {found}"
        )
    if actual.shape != expected.shape:
        return case.verdict(
            Status.SHAPE, detail=f"golden {list(expected.shape)}, actual {list(actual.shape)}"
        )
    verdict = _values(case, actual, expected, mask, scale)
    if verdict.ok or affect is None:
        return verdict
    over = beyond(actual, expected, verdict.tolerance, bitwise=tolerance.bitwise)
    return replace(verdict, affected=affect(actual, expected, over, mask, verdict.tolerance))


@dataclass(frozen=True)
class _Case:
    """What every verdict on a tensor repeats."""

    quantity: str
    name: str
    place: Place
    tolerance: Tolerance
    locate: Locate | None

    def verdict(self, status: Status, **found: Any) -> Verdict:
        known: dict[str, Any] = {"basis": self.tolerance.basis, "reason": self.tolerance.reason}
        return Verdict(status, self.quantity, self.name, self.place, **known, **found)

    def words(self, index: int, shape: tuple[int, ...]) -> str:
        return self.locate(index) if self.locate is not None else element(index, shape, self.name)


def element(index: int, shape: tuple[int, ...], name: str) -> str:
    """``element [3, 5] of NAME``, or just the name of a tensor with one value."""
    if not shape:
        return name
    return f"element {[int(i) for i in np.unravel_index(index, shape)]} of {name}"


def _absent(case: _Case, actual: Array | None, expected: Array | None) -> Verdict:
    if expected is not None:
        return case.verdict(
            Status.MISSING, detail=f"golden {_described(expected)}, and nothing of this name was recorded"
        )
    assert actual is not None, "a tensor that neither side has cannot be judged"
    return case.verdict(Status.EXTRA, detail=f"actual {_described(actual)}, and no golden of this name")


def _described(array: Array) -> str:
    return f"{dtype_name(array.dtype)} {list(array.shape)}"


def _values(
    case: _Case, actual: Array, expected: Array, mask: NDArray[np.bool_] | None, scale: float | None
) -> Verdict:
    inside = _Inside(actual, expected, mask)
    scale = largest(inside.golden) if scale is None else scale
    bound = _bound(case.tolerance, scale)
    bitwise = case.tolerance.bitwise
    found = measure(inside.actual, inside.golden, bound, bitwise=bitwise, row=inside.row)
    multiple = math.inf if bitwise and found.over else ratio(found.max_error, bound)
    figures = {"multiple": multiple, "tolerance": bound, **_figures(case, inside, found, scale)}
    if found.mismatched:
        return _mismatched(case, actual, expected, inside, found, figures)
    if (junk := _junk(actual, expected, mask)) is not None:
        worst = _worst(case, actual, expected, junk)
        detail = f"{_kind(worst.actual)} in padding, which no token covers"
        return case.verdict(Status.NONFINITE, detail=detail, worst=worst, **figures)
    worst_at = None if found.worst is None else _worst(case, actual, expected, inside.index(found.worst))
    if not found.over:
        return case.verdict(Status.OK, worst=worst_at, **figures)
    exact = not is_float(expected.dtype)
    differ = f"{found.over} of {found.count} elements differ{' in their bytes' if bitwise else ''}"
    return case.verdict(
        Status.MASK if exact else Status.DRIFT,
        detail=differ if exact or bitwise else "",
        worst=worst_at,
        **figures,
    )


def _figures(case: _Case, inside: _Inside, found: Measures, scale: float) -> dict[str, Any]:
    """What a verdict says of the errors, whatever was tolerated."""
    alpha, residual, row = found.alpha, found.residual, found.worst_row
    if found.over and alpha is not None and residual is not None and residual < 1e-6 * found.relative_l2:
        residual = scaled_residual(inside.actual, inside.golden, alpha)
    return {
        "max_error": found.max_error,
        "relative": ratio(found.max_error, scale),
        "relative_l2": found.relative_l2,
        "scale": scale,
        "over": found.over,
        "count": found.count,
        "mean_error": found.mean_error,
        "rmse": found.rmse,
        "max_relative": found.max_relative,
        "max_ulp": found.max_ulp,
        "alpha": alpha,
        "residual": residual,
        "quantiles": found.quantiles,
        "worst_row": None if row is None else _worst_row(case, inside, row),
        "distances": policy_distances(inside.actual, inside.golden) if case.quantity in QUANTITIES else None,
    }


def _worst_row(case: _Case, inside: _Inside, row: Row) -> WorstRow:
    assert inside.row is not None
    first = inside.index(row.index * inside.row)
    index = tuple(int(i) for i in np.unravel_index(first, inside.shape)[:-1])
    return WorstRow(index, case.words(first, inside.shape), row.error_l2, ratio(row.error_l2, row.golden_l2))


class _Inside:
    """The elements that a mask of the leading dimensions selects, and their flat indices in the whole tensor."""

    def __init__(self, actual: Array, golden: Array, mask: NDArray[np.bool_] | None) -> None:
        self.actual, self.golden = actual, golden
        self.shape: tuple[int, ...] = golden.shape
        whole = golden.ndim > (1 if mask is None else mask.ndim) and golden.shape[-1] > 1
        self.row: int | None = golden.shape[-1] if whole else None
        self._rows: NDArray[np.int64] | None = None
        self._width = 1
        if mask is not None and not mask.all():
            self._rows = np.flatnonzero(mask)
            self._width = math.prod(golden.shape[mask.ndim :])
            self.actual, self.golden = (
                array.reshape(mask.size, self._width)[self._rows] for array in (actual, golden)
            )

    def index(self, selected: int) -> int:
        """Flat index in the whole tensor of a selected element."""
        if self._rows is None:
            return selected
        row, rest = divmod(selected, self._width)
        return int(self._rows[row]) * self._width + rest


def _bound(tolerance: Tolerance, scale: float) -> float:
    if math.isinf(tolerance.relative):  # whatever the scale, even 0
        return math.inf
    return tolerance.relative * scale + tolerance.absolute


def _mismatched(
    case: _Case,
    actual: Array,
    expected: Array,
    inside: _Inside,
    found: Measures,
    figures: dict[str, Any],
) -> Verdict:
    assert found.first_mismatch is not None
    worst = _worst(case, actual, expected, inside.index(found.first_mismatch))
    detail = (
        f"golden {_kind(worst.golden)}, actual {_kind(worst.actual)} "
        f"({found.mismatched} of {found.count} elements do not match)"
    )
    return case.verdict(
        Status.NONFINITE,
        detail=detail,
        worst=worst,
        **{**figures, "multiple": math.inf, "over": found.mismatched},
    )


def _kind(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "finite" if math.isfinite(value) else "infinity" if value > 0 else "-infinity"


def _junk(actual: Array, expected: Array, mask: NDArray[np.bool_] | None) -> int | None:
    """Flat index of the first element outside of the mask that is not finite although its golden value is."""
    if mask is None or mask.all():
        return None
    outside = ~mask.reshape(*mask.shape, *[1] * (expected.ndim - mask.ndim))
    found = np.flatnonzero(nonfinite(actual) & ~nonfinite(expected) & outside)
    return int(found[0]) if found.size else None


def _worst(case: _Case, actual: Array, expected: Array, index: int) -> Worst:
    a, g = actual.reshape(-1)[index : index + 1], expected.reshape(-1)[index : index + 1]
    local = tuple(int(i) for i in np.unravel_index(index, expected.shape))
    values = float(g[0]), float(a[0])
    error = abs(values[1] - values[0]) if is_float(actual.dtype) else float(abs(int(a[0]) - int(g[0])))
    return Worst(
        local,
        case.words(index, expected.shape),
        *values,
        error,
        ulps_apart(a[0:1].reshape(()), g.reshape(())),
    )
