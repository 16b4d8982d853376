"""Canonical coordinates in words: the sample, position and token that an element of a local tensor belongs to."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from regress.compare.verdicts.tensor_case import Locate
from regress.dump.numpy_arrays import Array
from regress.layout import TokenFrame

TokenText = Callable[[int], str]
"""Function from a token id to its text."""


@dataclass(frozen=True)
class Locator:
    """Words for tokens of a frame.

    Attributes:
        token_ids: ``[frame.size]``, or None where they are unknown.
        text: text of a token id; by default its number.
    """

    frame: TokenFrame
    token_ids: Array | None = None
    text: TokenText | None = None

    def token(self, index: int) -> str:
        """Return text such as ``sample 000001-0002/3, position 17, token 'a'`` for a flat canonical index."""
        (group, run), position = self.frame.locate(index)
        words = f"sample {group}/{run}, position {position}"
        if self.token_ids is None:
            return words
        return f"{words}, token {self._spelled(int(self.token_ids[index]))}"

    def rows(self, tokens: NDArray[np.int64], inner: tuple[int, ...], columns: int | None) -> Locate:
        """Return words for flat indices of a tensor with a row for each of ``tokens``.

        Args:
            tokens: canonical token of each row, negative for padding.
            inner: shape of a row.
            columns: places in a row of the batch; None where rows are those of loss tokens over the vocabulary.
        """
        width = max(math.prod(inner), 1)

        def words(index: int) -> str:
            place, within = divmod(index, width)
            token = int(tokens[place])
            if columns is None:
                return f"{self.token(token)}, vocabulary entry {self._spelled(within)}"
            padding = "row {}, column {} (padding)".format(*divmod(place, columns)) if token < 0 else ""
            of = f", element {[int(i) for i in np.unravel_index(within, inner)]}" if inner else ""
            return (padding or self.token(token)) + of

        return words

    def _spelled(self, token_id: int) -> str:
        return str(token_id) if self.text is None else f"{token_id} {self.text(token_id)!r}"
