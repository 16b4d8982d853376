"""Canonical coordinates in words: the sample, position and token that an element of a local tensor belongs to."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from regress.compare.verdicts.case import Locate
from regress.dump.arrays import Array
from regress.layout import TokenFrame, TokenLayout

TokenText = Callable[[int], str]
"""The text of a token id."""


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

    def grid(self, layout: TokenLayout, shape: tuple[int, ...]) -> Locate:
        """Return words for flat indices of a ``[B, T, ...]`` or ``[B * T, ...]`` tensor."""
        B, T = layout.shape
        canonical = np.full(B * T, -1, np.int64)
        flat, local = layout.indices(self.frame.offsets)
        canonical[local] = flat
        rest = shape[2:] if shape[:2] == (B, T) else shape[1:]

        def words(index: int) -> str:
            place, within = divmod(index, max(math.prod(rest), 1))
            row, col = divmod(place, T)
            token = int(canonical[place])
            where = self.token(token) if token >= 0 else f"row {row}, column {col} (padding)"
            return where + _within(within, rest)

        return words

    def rows(self, canonical: NDArray[np.int64], width: int) -> Locate:
        """Return words for flat indices of a ``[K, V]`` tensor whose row ``k`` belongs to token ``canonical[k]``."""

        def words(index: int) -> str:
            row, entry = divmod(index, max(width, 1))
            return f"{self.token(int(canonical[row]))}, vocabulary entry {self._spelled(entry)}"

        return words

    def _spelled(self, token_id: int) -> str:
        return str(token_id) if self.text is None else f"{token_id} {self.text(token_id)!r}"


def _within(index: int, rest: tuple[int, ...]) -> str:
    return f", element {[int(i) for i in np.unravel_index(index, rest)]}" if rest else ""
