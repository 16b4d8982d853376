"""What a failing tensor of two dumps has in common where it is wrong: its tokens, or parts of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from regress.compare.diagnosis.surroundings import Surroundings
from regress.compare.diagnosis.traits import classes_of_rows, token_classes
from regress.compare.dumps.listing import Spans
from regress.compare.verdicts.affected import beyond
from regress.compare.verdicts.values import Blocks
from regress.compare.verdicts.verdict import Verdict
from regress.dump.arrays import Array
from regress.layout import SampleKey, TokenFrame

LIMIT = 1 << 20
"""Elements of a tensor that is looked at; a comparison may not need the memory for copies of a larger one."""


def with_affected(
    verdict: Verdict, blocks: Blocks, actual: Array, golden: Array, around: Surroundings, *, bitwise: bool
) -> Verdict:
    """A verdict that tells what is affected of a tensor that fails.

    Args:
        blocks: the elements that were compared.
        golden: an array of the golden dtype.
        bitwise: whether bytes were compared.
    """
    if verdict.ok or not verdict.count or actual.size > LIMIT:
        return verdict
    expected, known = np.zeros(actual.shape, golden.dtype), np.zeros(actual.shape, bool)
    for block in blocks():
        expected.reshape(-1)[block.places] = block.golden.reshape(-1)
        known.reshape(-1)[block.places] = True
    over = beyond(actual, expected, verdict.tolerance, bitwise=bitwise) & known
    inner = tuple(range(len(around.leading), actual.ndim))
    compared = None if around.traits is None else np.asarray(known.any(axis=inner))
    return replace(verdict, affected=around.affected(actual, expected, over, compared, verdict.tolerance))


def classes_of(
    spans: Spans | None,
    index: Mapping[SampleKey, int],
    frame: TokenFrame,
    ids: NDArray[np.int64] | None,
    loss: NDArray[np.bool_] | None,
) -> dict[str, NDArray[np.bool_]]:
    """Classes of the tokens of a unit, ``[frame.size]``: by what they are, and by where they lie in the actual record.

    Args:
        spans, index: where they lie, and the frame's number of each sample.
    """
    truth: Mapping[str, Mapping[str, Array]] = {} if ids is None else {"batch_inputs": {"input_ids": ids}}
    found = token_classes(truth, frame, loss)
    if spans is None:
        return found
    canonical = spans.canonical(index, frame.offsets)
    here = canonical >= 0
    for name, members in classes_of_rows(spans.shape, spans.segments).items():
        found[name] = np.zeros(frame.size, bool)
        found[name][canonical[here]] = members[here]
    return found
