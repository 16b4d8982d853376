"""Judgement of one tensor: presence, dtype, shape and values."""

from __future__ import annotations

from regress.compare.verdicts.block import Block
from regress.compare.verdicts.case import Case, Locate
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
