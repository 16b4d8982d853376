"""Microbatches whose losses can be compared, grouped so that both sides of a group hold the same tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from regress.compare.dumps.loss_shares import Group
from regress.compare.dumps.opened_dump import Side
from regress.compare.dumps.sample_matching import Matching
from regress.compare.quantities import SHARES, Kind, quantity_named, source_of
from regress.compare.record_header import Header
from regress.dump.coordinates import Place
from regress.layout import SampleKey


@dataclass(frozen=True)
class Shares:
    """The records of one type of an update that hold losses, one for ranks that repeat each other's tokens.

    Attributes:
        debug: golden records of the terms of the loss.
        place: place of the update.
    """

    record_type: str
    golden: Sequence[Header]
    actual: Sequence[Header]
    debug: Sequence[Header]
    place: Place
    matching: Matching

    def __bool__(self) -> bool:
        return any(_has_share(self.record_type, record) for record in (*self.golden, *self.actual))

    def terms(self) -> dict[str, str]:
        """Return golden record -> the one that holds weights and terms of its tokens, where there is one."""
        debug = {(r.key.rank, r.key.micro): r for r in self.debug}
        pairs = ((r.name, debug.get((r.key.rank, r.key.micro))) for r in self.golden)
        return {name: one.name for name, one in pairs if one is not None and "weights" in one.tensors}

    def summable(self) -> bool:
        """Return True if a case has the weights and terms of all losses, from which the share of any tokens follows."""
        known = {source_of(r.key.record_type, name) for r in self.debug for name in r.tensors}
        quantities = {source.quantity for source in known if source is not None}
        sources = (source_of(self.record_type, name) for record in self.golden for name in record.tensors)
        names = [s.name for s in sources if s is not None and quantity_named(s.quantity).kind is Kind.SHARE]
        return "weights" in quantities and all(SHARES.get(name) in quantities for name in names)

    def single(self) -> Iterator[Group]:
        """Yield a group for each actual microbatch, whose share is summed from golden terms."""
        for record in self.actual:
            place = replace(self.place, rank=record.key.rank, micro=record.key.micro)
            names = {
                key: to for key in record.samples if (to := self.matching.golden_of.get(key)) is not None
            }
            yield Group(tuple(r.name for r in self.golden), (record.name,), place, "", names)

    def groups(self) -> Iterator[Group]:
        """Yield the smallest groups of microbatches that hold the same samples on both sides."""
        groups: dict[int, tuple[list[Header], list[Header]]] = {}
        of: dict[SampleKey, int] = {}
        joined: dict[int, int] = {}

        def group_of(number: int) -> int:
            while number in joined:
                number = joined[number]
            return number

        named = [(record, self.matching.alias, 0) for record in self.golden]
        named += [(record, self.matching.golden_of, 1) for record in self.actual]
        for number, (record, names, side) in enumerate(named):
            # the samples of a record may be unknown
            mine = {names.get(key, key) for key in record.samples} or {
                (f"rank {record.key.rank}", record.key.micro or 0)
            }
            groups[number] = ([], [record]) if side else ([record], [])
            for other in sorted({group_of(of[key]) for key in mine if key in of}):
                joined[other] = number
                groups[number] = _together(groups.pop(other), groups[number])
            of |= dict.fromkeys(mine, number)
        for own, theirs in groups.values():
            if own and theirs:
                yield self._group(own, theirs)

    def _group(self, own: Sequence[Header], theirs: Sequence[Header]) -> Group:
        place = self.place
        if len(theirs) == 1:
            place = replace(place, rank=theirs[0].key.rank, micro=theirs[0].key.micro)
        count = len({key for record in theirs for key in record.samples})
        whose = f"{count} samples, " if count else ""
        words = f"{whose}{_count(len(own))} of the golden dump and {_count(len(theirs))} of the actual one"
        return Group(tuple(r.name for r in own), tuple(r.name for r in theirs), place, words)


def _together(
    one: tuple[list[Header], list[Header]], other: tuple[list[Header], list[Header]]
) -> tuple[list[Header], list[Header]]:
    return one[0] + other[0], one[1] + other[1]


def once(records: Sequence[Header], side: Side) -> list[Header]:
    """Return the records without those of ranks that repeat another one's tokens."""
    found: dict[tuple[int, int | None], Header] = {}
    for record in sorted(records, key=lambda record: record.key.rank or 0):
        found.setdefault((side.root(record.key.rank or 0), record.key.micro), record)
    return list(found.values())


def _has_share(record_type: str, record: Header) -> bool:
    sources = (source_of(record_type, name) for name in record.tensors)
    return any(s is not None and quantity_named(s.quantity).kind is Kind.SHARE for s in sources)


def _count(number: int) -> str:
    return f"{number} microbatch{'es' if number > 1 else ''}"
