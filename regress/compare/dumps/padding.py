"""A tensor of tokens beside its golden values, and values outside of the comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from regress.compare.diagnosis.failure_context import FailureContext
from regress.compare.dumps.token_overlap import BLOCK, Index, Part, blocks
from regress.compare.metrics.stripes import nonfinite
from regress.compare.verdicts.case import Case, Locate, kind
from regress.compare.verdicts.verdict import Verdict
from regress.dump.arrays import Array, is_float
from regress.dump.mapped import release


@dataclass(frozen=True, eq=False)
class Aligned:
    """A tensor of tokens and its golden counterpart.

    Attributes:
        part: the actual tensor; ``parts`` the golden ones; ``selected`` its rows that count.
        words: canonical coordinates of an element.
        padding: True if it has rows that hold no token.
        around: finds the failure context of its tokens.
    """

    part: Part
    parts: Sequence[Part]
    selected: Index
    words: Locate
    padding: bool
    around: Callable[[], FailureContext]

    def values(self) -> tuple[Array, Array]:
        """Return the golden and the actual values that count, token beside token."""
        found = [*blocks(self.part, self.parts, self.selected)]
        golden = [block.golden for block in found] or [self.parts[0].array.reshape(-1)[:0]]
        actual = [block.actual for block in found] or [self.part.array.reshape(-1)[:0]]
        return np.concatenate(golden), np.concatenate(actual)


def judge_padding(verdict: Verdict, case: Case, found: Aligned) -> Verdict:
    """Return a failing verdict for a non-finite value beside the loss tokens without a golden counterpart, else the
    verdict as given."""
    part = found.part
    if not is_float(part.array.dtype) or not part.array.size:
        return verdict
    outside = np.ones(part.rows.size, bool)
    outside[found.selected] = False
    width, tolerated = max(part.width, 1), _Tolerated(found.parts)
    for row, inner in _nonfinite_rows(part.array.reshape(part.rows.size, width), np.flatnonzero(outside)):
        if not tolerated.at(int(part.rows[row])):
            column = int(np.flatnonzero(nonfinite(inner))[0])
            value = float(inner[column])
            detail = f"{kind(value)} where no loss token lies, and nothing of the kind in the golden dump"
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
