"""A local tensor beside its golden values, and its verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from regress.compare.alignment.token_overlap import BLOCK, Index, Part, blocks
from regress.compare.diagnosis.failure_context import FailureContext
from regress.compare.metrics.striped_measures import Measures, nonfinite
from regress.compare.verdicts.affected_elements import beyond
from regress.compare.verdicts.tensor_case import Block, Case, Locate, kind
from regress.compare.verdicts.tensor_judge import Blocks, judge_values, wrong_dtype
from regress.compare.verdicts.verdict import Status, Verdict
from regress.dump.mapped_arrays import release
from regress.dump.numpy_arrays import Array, is_float

LIMIT = 1 << 20
"""Most elements of a tensor that a failure is examined of; copies of larger ones would need too much memory."""


@dataclass(frozen=True, eq=False)
class Aligned:
    """A local tensor and its golden counterpart.

    Attributes:
        actual: the local tensor; ``golden`` an array of the golden dtype.
        pairs: yields the elements that count beside their golden values.
        words: canonical coordinates of an element; None for its index.
        around: finds the failure context; None if nobody asks what is affected.
        tokens: rows of tokens; None for other tensors.
    """

    actual: Array
    golden: Array
    pairs: Blocks
    words: Locate | None
    around: Callable[[], FailureContext] | None = None
    tokens: TokenRows | None = None

    @classmethod
    def of_tokens(
        cls, rows: TokenRows, words: Locate, around: Callable[[], FailureContext] | None = None
    ) -> Aligned:
        """Return a tensor of tokens beside its golden values."""
        actual = rows.part.array.reshape(rows.part.shape)
        return cls(actual, rows.golden[0].array, rows.blocks, words, around, rows)

    def among(self, rows: TokenRows) -> Aligned:
        """Return the same tensor with other rows of tokens."""
        return replace(self, tokens=rows, pairs=rows.blocks)


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Rows of tokens: the actual part, the golden ones, and the actual rows that count."""

    part: Part
    golden: Sequence[Part]
    selected: Index

    def blocks(self) -> Iterator[Block]:
        """Yield the elements that count beside their golden values."""
        return blocks(self.part, self.golden, self.selected)

    def values(self) -> tuple[Array, Array]:
        """Return the golden and the actual values that count, token beside token."""
        found = [*self.blocks()]
        golden = [block.golden for block in found] or [self.golden[0].array.reshape(-1)[:0]]
        actual = [block.actual for block in found] or [self.part.array.reshape(-1)[:0]]
        return np.concatenate(golden), np.concatenate(actual)


def judge_aligned(
    case: Case,
    found: Aligned,
    scale: float | None = None,
    dtype: str | None = None,
    seen: list[Measures] | None = None,
) -> Verdict:
    """Judge a tensor: dtype, non-finite values, values, and non-finite values in places that do not count.

    Args:
        scale: scale of the tolerance; by default the largest golden value that is compared.
        dtype: name of the dtype that the actual tensor must have; by default any.
        seen: receives the measures, if anything was measured.
    """
    wrong = wrong_dtype(case, found.actual, found.golden, dtype)
    if wrong is not None:
        return wrong
    verdict = judge_values(case, found.pairs, is_float(found.golden.dtype), scale, seen)
    rows = found.tokens
    if (
        rows is not None
        and rows.selected.size < rows.part.rows.size
        and verdict.status is not Status.NONFINITE
    ):
        verdict = _judge_outside(verdict, case, rows)
    return verdict if verdict.ok else _with_affected(verdict, case, found)


def _judge_outside(verdict: Verdict, case: Case, found: TokenRows) -> Verdict:
    """Return a failing verdict for a new non-finite value in a row that does not count, else the one given."""
    part = found.part
    if not is_float(part.array.dtype) or not part.array.size:
        return verdict
    outside = np.ones(part.rows.size, bool)
    outside[found.selected] = False
    width, tolerated = max(part.width, 1), _Tolerated(found.golden)
    for row, inner in _nonfinite_rows(part.array.reshape(part.rows.size, width), np.flatnonzero(outside)):
        if not tolerated.at(int(part.rows[row])):
            column = int(np.flatnonzero(nonfinite(inner))[0])
            value = float(inner[column])
            beside = "where no loss token lies, and nothing of the kind on the golden side"
            where = "in padding, which no token covers" if part.rows[row] < 0 else beside
            detail = f"{kind(value)} {where}"
            return case.uncompared(verdict, row * width + column, value, detail)
    return verdict


@dataclass(frozen=True)
class _Tolerated:
    """Places where golden records hold non-finite values, too."""

    parts: Sequence[Part]

    def at(self, token: int) -> bool:
        """Return True if golden records have non-finite values at a token, or, for padding, in theirs."""
        if token < 0:
            return self._padding
        found = ((part, int(part.find(np.array([token]))[0])) for part in self.parts)
        return any(bool(nonfinite(part.array[at]).any()) for part, at in found if at >= 0)

    @cached_property
    def _padding(self) -> bool:
        return any(
            True
            for part in self.parts
            if part.array.size
            for _ in _nonfinite_rows(
                part.array.reshape(part.rows.size, max(part.width, 1)), np.flatnonzero(part.rows < 0)
            )
        )


def _nonfinite_rows(array: Array, rows: Index) -> Iterator[tuple[int, Array]]:
    """Yield index and values of each row with a non-finite value."""
    step = max(BLOCK // array.shape[1], 1)
    for start in range(0, rows.size, step):
        here = rows[start : start + step]
        values = array[here]
        for at in np.flatnonzero(nonfinite(values).any(axis=1)).tolist():
            yield int(here[at]), values[at]
        release(array[here[0] : here[-1] + 1])


def _with_affected(verdict: Verdict, case: Case, found: Aligned) -> Verdict:
    """Return a failing verdict that describes the affected part of its tensor."""
    actual = found.actual
    if not verdict.count or found.around is None or actual.size > LIMIT:
        return verdict
    around = found.around()
    expected, known = np.zeros(actual.shape, found.golden.dtype), np.zeros(actual.shape, bool)
    for block in found.pairs():
        expected.reshape(-1)[block.places] = block.golden.reshape(-1)
        known.reshape(-1)[block.places] = True
    bound = verdict.tolerance
    over = beyond(actual, expected, bound, bitwise=case.tolerance.bitwise) & known
    inner = tuple(range(len(around.leading), actual.ndim))
    compared = None if around.traits is None else np.asarray(known.any(axis=inner))
    return replace(verdict, affected=around.affected(actual, expected, over, compared, bound))
