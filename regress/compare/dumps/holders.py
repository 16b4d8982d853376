"""Records that hold part of a full tensor, looked up by the shards that they share elements with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from regress.compare.alignment.shard_overlap import IntervalIndex
from regress.compare.dumps.listing import Listed
from regress.layout import ShardLayout

_At = tuple[int | None, int | None]
"""Rank and microbatch; gradients and parameters have no microbatch unless their taps gave one."""


class Holders:
    """The golden records of a stage, by the parts of the tensors that they hold."""

    def __init__(self, golden: Iterable[Listed]) -> None:
        self._golden = sorted(golden, key=lambda record: record.key.rank or 0)
        self._tensors: dict[tuple[str, tuple[int, ...]], _Tensor] = {}
        self._shapes: dict[str, dict[tuple[int, ...], Listed]] = {}
        self._unusable: list[Listed] = []
        for record in self._golden:
            for name in record.tensors:
                layout = record.layout(name)
                if layout is None:
                    self._unusable.append(record)
                    continue
                self._tensors.setdefault((name, layout.shape), _Tensor()).add(record, layout)
                self._shapes.setdefault(name, {}).setdefault(layout.shape, record)

    def of(self, record: Listed) -> list[Listed]:
        """Return the golden records that an actual one is compared with, that of its own rank first.

        If several ranks hold a part, one of them stands for all, that of the same rank if it is among them. If no
        golden tensor has that shape, those of other shapes are returned, so that shapes are compared. A record that
        cannot be used is returned, too, to be reported. If nobody holds any of it, one record remains to compare
        metadata with.
        """
        found = {other.name: other for other in self._unusable}
        for name in record.tensors:
            layout = record.layout(name)
            if layout is None:
                continue
            known = self._tensors.get((name, layout.shape))
            for other in () if known is not None else self._shapes.get(name, {}).values():
                found[other.name] = other
            for holder in () if known is None else known.holders(layout, record):
                found[holder.name] = holder
        return likeliest(found.values() or self._golden[:1], record)


def likeliest(found: Iterable[Listed], record: Listed) -> list[Listed]:
    """Return golden records, those of the rank and microbatch of an actual one first."""
    rank, micro = record.key.rank, record.key.micro
    return sorted(
        found,
        key=lambda g: (g.key.rank != rank, g.key.micro != micro, g.key.rank or 0, g.key.micro or 0),
    )


@dataclass(eq=False)
class _Tensor:
    """Holders of one tensor: layout -> rank and microbatch -> the record that holds this part of it."""

    parts: dict[ShardLayout, dict[_At, Listed]] = field(default_factory=dict)

    def add(self, record: Listed, layout: ShardLayout) -> None:
        at = record.key.rank, record.key.micro
        self.parts.setdefault(layout, {}).setdefault(at, record)

    def holders(self, layout: ShardLayout, record: Listed) -> Iterable[Listed]:
        """Return one record for each part that overlaps a layout; a single one if its part is the same."""
        if layout in self.parts:
            return [_one(self.parts[layout], record)]
        return [_one(self.parts[self._layouts[i]], record) for i in self._near.of(layout.ranges)]

    @cached_property
    def _layouts(self) -> Sequence[ShardLayout]:
        return [*self.parts]

    @cached_property
    def _near(self) -> IntervalIndex:
        return IntervalIndex(self._layouts)


def _one(holders: dict[_At, Listed], record: Listed) -> Listed:
    """Return the record of the same rank and microbatch, else of the same rank, else the first."""
    same = (record.key.rank, record.key.micro)
    if same in holders:
        return holders[same]
    return next(
        (known for (rank, _), known in holders.items() if rank == same[0]), next(iter(holders.values()))
    )
