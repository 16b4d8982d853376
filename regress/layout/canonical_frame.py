"""Canonical coordinates of a batch: its samples, their lengths and their order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from regress.layout.token_layout import offsets_of

SampleKey = tuple[str, int]
"""``(group_id, run_id)``: the key of a sample within its step."""


@dataclass(frozen=True)
class TokenFrame:
    """``N`` samples laid end to end; token ``position`` of sample ``i`` is flat element ``offsets[i] + position``.

    Args:
        samples: key of each sample, in canonical order.
        lengths: tokens of each sample.
    """

    samples: tuple[SampleKey, ...]
    lengths: tuple[int, ...]

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """``[N + 1]`` start of every sample, and the end of the last one."""
        return offsets_of(self.lengths)

    @cached_property
    def index(self) -> dict[SampleKey, int]:
        """Number of each sample in the frame."""
        return {key: number for number, key in enumerate(self.samples)}

    @property
    def size(self) -> int:
        """Number of tokens in all samples."""
        return sum(self.lengths)

    def locate(self, index: int) -> tuple[SampleKey, int]:
        """Return the sample and the position of a flat token index."""
        sample = int(np.searchsorted(self.offsets, index, side="right")) - 1
        return self.samples[sample], index - int(self.offsets[sample])

    def select(self, samples: Sequence[int]) -> TokenFrame:
        """Return the frame of some of the samples, in the order given."""
        return TokenFrame(tuple(self.samples[i] for i in samples), tuple(self.lengths[i] for i in samples))

    def updates(self, epochs: int = 1, size: int | None = None) -> Iterator[tuple[int | None, TokenFrame]]:
        """Yield the optimizer updates of a step that trains on these samples.

        Args:
            epochs: passes over all samples.
            size: samples per update; all of them by default.

        Yields:
            The number of the update within the step (None if the step has only one) and its samples.
        """
        count = len(self.samples)
        cut = size or count
        parts = [range(start, min(start + cut, count)) for start in range(0, count, cut)]
        several = epochs * len(parts) > 1
        for index, part in enumerate(part for _ in range(epochs) for part in parts):
            yield (index if several else None), self.select(part)
