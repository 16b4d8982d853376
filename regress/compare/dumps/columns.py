"""One quantity at the tokens of a record, golden and actual side by side."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from regress.compare.alignment.aligned import TokenRows
from regress.compare.alignment.token_overlap import Index
from regress.compare.verdicts.tolerance import Tolerance


@dataclass(frozen=True, eq=False)
class Column:
    """Values at loss tokens.

    Attributes:
        quantity: name of the quantity, such as ``log_probs``.
        tokens: ``[n]`` flat index in the unit's frame.
        golden, actual: ``[n]``.
        tolerance: tolerance of the quantity.
    """

    quantity: str
    tokens: Index
    golden: NDArray[np.float64]
    actual: NDArray[np.float64]
    tolerance: Tolerance

    @classmethod
    def of(cls, quantity: str, found: TokenRows, tolerance: Tolerance) -> Column:
        """Return the column of a tensor with one element for each token."""
        known = [*found.blocks()]
        tokens = [found.part.rows[block.places] for block in known]
        golden, actual = found.values()
        return cls(
            quantity,
            np.concatenate([np.zeros(0, np.int64), *tokens]),
            golden.astype(np.float64),
            actual.astype(np.float64),
            tolerance,
        )
