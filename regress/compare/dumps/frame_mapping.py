"""Tokens of one frame in another: their numbers there, and their values in its order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from regress.dump.numpy_arrays import Array
from regress.layout import SampleKey, TokenFrame

Floats: TypeAlias = NDArray[np.float64]


def numbers(tokens: NDArray[np.int64], frame: TokenFrame, into: TokenFrame) -> NDArray[np.int64]:
    """Return the numbers that tokens of a frame have in another one, -1 for those without one."""
    sample = np.searchsorted(frame.offsets, tokens, side="right") - 1
    index = into.index
    own = np.array([index.get(key, -1) for key in frame.samples], np.int64)[sample]
    starts = np.asarray(into.offsets)
    place = starts[own] + tokens - np.asarray(frame.offsets)[sample]
    return np.where((own >= 0) & (place < starts[own + 1]), place, -1)


def in_frame(
    values: Array,
    own: TokenFrame,
    names: Mapping[SampleKey, SampleKey] | None,
    frame: TokenFrame,
    fill: float,
) -> Floats:
    """Return values of the tokens of one frame in the order of another.

    Args:
        names: own key of a sample -> the key in the other frame; None if they are the same.
        fill: value of the samples that are absent, or of another length.
    """
    found = np.full((frame.size, *values.shape[1:]), fill, np.float64)
    index = frame.index
    for number, key in enumerate(own.samples):
        to = index.get(key if names is None else names.get(key, key))
        if to is not None and own.lengths[number] == frame.lengths[to]:
            here, there = (slice(*f.offsets[n : n + 2]) for f, n in ((own, number), (frame, to)))
            found[there] = values[here]
    return found
