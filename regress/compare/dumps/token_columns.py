"""Tensors of the tokens of a record, golden and actual side by side."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from regress.compare.alignment.aligned_tensor import TokenRows
from regress.compare.alignment.token_overlap import Index
from regress.compare.alignment.token_places import Mask
from regress.compare.dumps.comparison_unit import Unit
from regress.compare.dumps.unit_work import opened
from regress.compare.quantities import Kind, quantity_named
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


def columns(unit: Unit) -> tuple[Index | None, Mask | None, list[Column]]:
    """Return the columns of a record: golden token ids, loss tokens, and quantities with a value a token."""
    work = opened(unit)
    found = [
        Column.of(source.quantity, one.tokens, work.tolerance(source, one.actual, one.golden))
        for source, one in work.aligned()
        if not isinstance(one, str)
        and one.tokens is not None
        and quantity_named(source.quantity).kind is Kind.TOKEN
        and one.tokens.part.width == 1
    ]
    return *work.records.golden_tokens(), found


def aligned(unit: Unit) -> dict[str, TokenRows | str | None]:
    """Return the tensors of tokens of one record, by name; a sentence for one that cannot be placed."""
    found = opened(unit).aligned()
    return {source.tensor: one if isinstance(one, str) else one.tokens for source, one in found}
