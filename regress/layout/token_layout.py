"""Token layouts: the place of every token of every sample in a local ``[B, T]`` tensor.

Canonical coordinates of a token are ``(sample, position)``; no layout can change them. A :class:`TokenLayout`
maps them to ``(row, column)`` of one rank's microbatch. Right padding, left padding, packing, dynamic batches
and sequence splits are all token layouts; positions that no segment covers are padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

PADDING = -1


class Segment(NamedTuple):
    """Positions ``start:stop`` of ``sample`` lie at ``[row, col : col + stop - start]``."""

    sample: int
    start: int
    stop: int
    row: int
    col: int


@dataclass(frozen=True)
class TokenLayout:
    """Layout of one microbatch on one rank.

    Args:
        shape: ``(B, T)`` of the local tensors.
        segments: positions of the samples, in local order; ``sample`` indexes the canonical batch.

    Raises:
        ValueError: if a segment is empty, leaves the tensor, or overlaps another one.
    """

    shape: tuple[int, int]
    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        rows, columns = self.shape
        taken = np.zeros(self.shape, dtype=bool)
        for segment in self.segments:
            sample, start, stop, row, col = segment
            width = stop - start
            if sample < 0 or start < 0 or width <= 0:
                raise ValueError(
                    f"{segment} is empty or negative; a segment holds at least one token of a sample"
                )
            if not (0 <= row < rows and col >= 0 and col + width <= columns):
                raise ValueError(f"{segment} leaves the local tensor of shape {self.shape}")
            if taken[row, col : col + width].any():
                raise ValueError(
                    f"{segment} overlaps another segment; every local position holds at most one token"
                )
            taken[row, col : col + width] = True

    @cached_property
    def sample_ids(self) -> NDArray[np.int64]:
        """``[B, T]`` canonical sample index at each local position, ``PADDING`` where there is none."""
        return self._paint(lambda segment, _: np.int64(segment.sample))

    @cached_property
    def positions(self) -> NDArray[np.int64]:
        """``[B, T]`` position of each token in its own sample, ``PADDING`` where there is none."""
        return self._paint(lambda segment, offsets: segment.start + offsets)

    @cached_property
    def position_ids(self) -> NDArray[np.int64]:
        """``[B, T]`` position ids for the model: restarted for every sample, 0 on padding."""
        return np.maximum(self.positions, 0)

    @cached_property
    def attention_mask(self) -> NDArray[np.bool_]:
        """``[B, T]`` True where a token lies."""
        return np.not_equal(self.sample_ids, PADDING)

    @property
    def num_tokens(self) -> int:
        """Tokens covered by segments."""
        return sum(segment.stop - segment.start for segment in self.segments)

    def indices(self, offsets: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return paired indices between canonical and local tensors.

        Args:
            offsets: ``[N + 1]`` start of every sample in the canonical flat tensor (samples laid end to end).

        Returns:
            ``(canonical, local)``, each ``[num_tokens]``: element ``canonical[i]`` of the flat tensor is element
            ``local[i]`` of the flattened ``[B, T]`` tensor. Ordered by segment, then by position.
        """
        columns = self.shape[1]
        canonical = [np.arange(s.start, s.stop) + offsets[s.sample] for s in self.segments]
        local = [np.arange(s.stop - s.start) + s.row * columns + s.col for s in self.segments]
        return _concatenate(canonical), _concatenate(local)

    def scatter(self, flat: NDArray[Any], offsets: NDArray[np.int64], fill: Any = 0) -> NDArray[Any]:
        """Return a flat array (samples end to end) laid out as ``[B, T]``; padding holds ``fill``."""
        canonical, local = self.indices(offsets)
        out = np.full(self.shape, fill, dtype=flat.dtype)
        out.reshape(-1)[local] = flat[canonical]
        return out

    def gather(self, local: NDArray[Any], flat: NDArray[Any], offsets: NDArray[np.int64]) -> None:
        """Write the tokens of a ``[B, T]`` array back to their places in the canonical ``flat`` array."""
        canonical, index = self.indices(offsets)
        flat[canonical] = local.reshape(-1)[index]

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict that :meth:`from_json` reads."""
        return {"shape": list(self.shape), "segments": [list(segment) for segment in self.segments]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TokenLayout:
        """Rebuild a layout written by :meth:`to_json`."""
        rows, columns = data["shape"]
        return cls((int(rows), int(columns)), tuple(Segment(*map(int, row)) for row in data["segments"]))

    def _paint(self, value: Any) -> NDArray[np.int64]:
        out = np.full(self.shape, PADDING, dtype=np.int64)
        for segment in self.segments:
            width = segment.stop - segment.start
            out[segment.row, segment.col : segment.col + width] = value(segment, np.arange(width))
        return out


def offsets_of(lengths: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the ``[N + 1]`` start of every sample when samples of these lengths are laid end to end."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(np.asarray(lengths, dtype=np.int64))])


def _concatenate(parts: Iterable[NDArray[np.int64]]) -> NDArray[np.int64]:
    arrays = list(parts)
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64)
