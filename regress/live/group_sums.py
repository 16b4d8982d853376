"""Sums of the advantages of groups, whose rows may lie in several microbatches, ranks and updates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from regress.live.guarded_microbatch import Microbatch

SHARE = 1e-2
"""Part of the sum of magnitudes that the sum of a group may have. Rewards of 1000 that differ by 0.01 leave 6e-3 in
float32; a wrong baseline or group leaves a good part of 1."""

Part = tuple[Any, Any, float]
"""Group, sample (None where unknown) and advantage of a row."""


class GroupSums:
    """Collects advantages until a group is complete.

    Args:
        size: rows of a group; None if nobody tells, so that no group is ever complete.
    """

    def __init__(self, size: int | None) -> None:
        self.size = size
        self._open: dict[Any, dict[Any, float]] = {}

    def parts(self, micros: Sequence[Microbatch]) -> list[Part]:
        """Return the rows of microbatches whose group and advantage are known."""
        if self.size is None:
            return []
        return [part for micro in micros for part in _rows(micro)]

    def add(self, parts: Iterable[Part]) -> list[str]:
        """Take rows of all ranks and return a sentence for each group that is complete: empty if it adds up to 0."""
        sentences = []
        for group, sample, advantage in parts:
            known = self._open.setdefault(group, {})
            known[len(known) if sample is None else sample] = advantage
            if len(known) == self.size:
                sentences.append(_sum(group, [*self._open.pop(group).values()]))
        return sentences


def _rows(micro: Microbatch) -> Iterator[Part]:
    if micro.groups is None or micro.advantages is None:
        return
    for row, group in enumerate(micro.groups):
        values: Tensor = micro.advantages[row][micro.mask[row]]
        if not values.numel():
            values = micro.advantages[row]
        if bool((values == values[0]).all()):
            yield group, None if micro.samples is None else micro.samples[row], float(values[0])


def _sum(group: Any, values: list[float]) -> str:
    total, size = sum(values), sum(abs(value) for value in values)
    if abs(total) <= SHARE * size:
        return ""
    return (
        f"advantages of group {group} add up to {total:.4g}, {abs(total) / size:.1%} of their magnitudes, and not "
        "to 0: the baseline is not the mean of this group, or its rows belong to different groups"
    )
