"""Common features of the affected elements of a failing tensor of two dumps: tokens, or parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from regress.compare.diagnosis.failure_context import FailureContext
from regress.compare.verdicts.affected import beyond
from regress.compare.verdicts.values import Blocks
from regress.compare.verdicts.verdict import Verdict
from regress.dump.arrays import Array

LIMIT = 1 << 20
"""Elements of a tensor that is looked at; a comparison may not need the memory for copies of a larger one."""


def with_affected(
    verdict: Verdict,
    blocks: Blocks,
    actual: Array,
    golden: Array,
    around: Callable[[], FailureContext],
    *,
    bitwise: bool,
) -> Verdict:
    """Return a verdict that describes the affected part of a tensor that fails.

    Args:
        blocks: the elements that were compared.
        golden: an array of the golden dtype.
        around: finds the failure context of the tensor.
        bitwise: True if bytes were compared.
    """
    if verdict.ok or not verdict.count or actual.size > LIMIT:
        return verdict
    found = around()
    expected, known = np.zeros(actual.shape, golden.dtype), np.zeros(actual.shape, bool)
    for block in blocks():
        expected.reshape(-1)[block.places] = block.golden.reshape(-1)
        known.reshape(-1)[block.places] = True
    over = beyond(actual, expected, verdict.tolerance, bitwise=bitwise) & known
    inner = tuple(range(len(found.leading), actual.ndim))
    compared = None if found.traits is None else np.asarray(known.any(axis=inner))
    return replace(verdict, affected=found.affected(actual, expected, over, compared, verdict.tolerance))
