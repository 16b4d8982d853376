"""Judgement of one tensor: presence, dtype, shape and values."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from regress.compare.metrics.stripes import nonfinite
from regress.compare.verdicts.block import Block
from regress.compare.verdicts.case import Case, Locate, kind
from regress.compare.verdicts.tolerance import Tolerance
from regress.compare.verdicts.values import judge_values, wrong_dtype
from regress.compare.verdicts.verdict import Place, Status, Verdict
from regress.dump.arrays import Array, dtype_name, is_float


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
) -> Verdict:
    """Judge a tensor, the graver faults first: missing, extra, dtype, shape, non-finite values, values.

    A golden float in place of an integer (or the reverse) is a verdict on the dtype whatever ``dtype`` says. Integers
    and booleans are compared exactly: where they differ the status is ``mask``. NaN and infinities must match by
    position, kind and sign; a non-finite value outside of ``mask`` whose golden value is finite is a fault too,
    while finite values there are not looked at. Equal zeros pass whatever the tolerance, and so do empty tensors, with
    ``count`` 0: whether nothing at all was compared is for the caller to judge.

    Args:
        actual, expected: the two tensors; None where there is none (not both).
        mask: mask of the leading dimensions of ``expected``; only elements where it holds are compared.
        scale: scale of the tolerance; by default the largest absolute value of ``expected`` inside the mask.
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
    blocks = (_selected(actual, expected, mask),)
    verdict = judge_values(case, lambda: blocks, is_float(expected.dtype), scale)
    if verdict.count < expected.size and verdict.status is not Status.NONFINITE:
        assert mask is not None
        verdict = _junk(verdict, case, actual, expected, mask)
    return verdict


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


def _selected(actual: Array, golden: Array, mask: NDArray[np.bool_] | None) -> Block:
    """Return the elements that a mask of the leading dimensions selects."""
    inner = golden.shape[1 if mask is None else mask.ndim :]
    row = inner[-1] if inner and inner[-1] > 1 else None
    if mask is None or mask.all():
        return Block(actual, golden, row=row)
    rows, width = np.flatnonzero(mask), math.prod(inner)
    return Block(
        actual.reshape(mask.size, width)[rows], golden.reshape(mask.size, width)[rows], rows, row, width
    )


def _junk(verdict: Verdict, case: Case, actual: Array, golden: Array, mask: NDArray[np.bool_]) -> Verdict:
    """Return the first element outside of the mask that is not finite although its golden value is."""
    outside = ~mask.reshape(*mask.shape, *[1] * (golden.ndim - mask.ndim))
    found = np.flatnonzero(nonfinite(actual) & ~nonfinite(golden) & outside)
    if not found.size:
        return verdict
    worst = case.worst(Block(actual, golden), int(found[0]))
    detail = f"{kind(worst.actual)} in padding, which no token covers"
    return replace(verdict, status=Status.NONFINITE, detail=detail, worst=worst)
