"""Who holds which part of the full tensors of a stage: of all records only those that a shard has elements in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from regress.compare.dumps.boxes import Nearby
from regress.compare.dumps.listing import Listed
from regress.layout import ShardLayout


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
        """The golden records that an actual one is compared with, that of its own rank first.

        Several ranks may hold a part: one of them stands for all, that of the same rank if it is among them. A record
        whose tensor has another shape is among them, too, for the shapes to be compared, and so is one that cannot be
        used, for it to be told. If nobody has anything of it there is still one to compare metadata with.
        """
        found = {other.name: other for other in self._unusable}
        for name in record.tensors:
            layout = record.layout(name)
            if layout is None:
                continue
            for shape, other in self._shapes.get(name, {}).items():
                if shape != layout.shape:
                    found[other.name] = other
            known = self._tensors.get((name, layout.shape))
            for holder in () if known is None else known.holders(layout, record.key.rank):
                found[holder.name] = holder
        rank = record.key.rank
        return sorted(found.values() or self._golden[:1], key=lambda g: (g.key.rank != rank, g.key.rank or 0))


@dataclass(eq=False)
class _Tensor:
    """One tensor: layout -> rank -> the record that holds this part of it."""

    parts: dict[ShardLayout, dict[int | None, Listed]] = field(default_factory=dict)

    def add(self, record: Listed, layout: ShardLayout) -> None:
        self.parts.setdefault(layout, {}).setdefault(record.key.rank, record)

    def holders(self, layout: ShardLayout, rank: int | None) -> Iterable[Listed]:
        """One record for each part that has an element of a layout; one alone where somebody holds just the same."""
        if layout in self.parts:
            return [_one(self.parts[layout], rank)]
        return [_one(self.parts[self._layouts[i]], rank) for i in self._near.of(layout.ranges)]

    @cached_property
    def _layouts(self) -> Sequence[ShardLayout]:
        return [*self.parts]

    @cached_property
    def _near(self) -> Nearby:
        return Nearby(self._layouts)


def _one(holders: dict[int | None, Listed], rank: int | None) -> Listed:
    return holders[rank] if rank in holders else next(iter(holders.values()))
