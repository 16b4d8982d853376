"""Element-by-element comparison of tensors without a token layout.

Without a token layout a tensor can be compared only with one of the same shape, recorded by the same rank for the same
microbatch. Other known layouts of that microbatch must not contradict this.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from regress.compare.alignment.token_spans import NO_LAYOUT, Spans
from regress.compare.dumps.sample_matching import Matching
from regress.compare.quantities import (
    OTHER,
    UPDATE_TYPES,
    Kind,
    nearest_tensor,
    quantity_named,
    source_of,
    source_or_other,
)
from regress.compare.record_header import Header
from regress.dump.coordinates import Place

Pair = tuple[Header, Header]


@dataclass(frozen=True)
class Elementwise:
    """The records of one type of an update on both sides.

    Attributes:
        where: place named in problems.
        layouts: for each side, places of the tokens of each rank and microbatch, as far as any record tells.
    """

    record_type: str
    where: str
    golden: Sequence[Header]
    actual: Sequence[Header]
    layouts: tuple[Mapping[Place, Spans], Mapping[Place, Spans]]
    matching: Matching

    @property
    def bare(self) -> bool:
        """True if a record has no token layout."""
        return any(record.bare for record in (*self.golden, *self.actual))

    def refusal(self) -> str | None:
        """Return why records without a layout cannot be compared at all; None if they can."""
        for side, records in (("golden", self.golden), ("actual", self.actual)):
            other = next((r for r in (*self.golden, *self.actual) if not r.bare), None)
            first = next((record for record in records if record.bare), None)
            if first is not None and other is not None:
                return (
                    f"{self.where}: {first.key} of the {side} dump has no token layout, but {other.key} has one"
                    f"{'' if other in records else ' in the other dump'}: {NO_LAYOUT}"
                )
        for side, records in (("golden", self.golden), ("actual", self.actual)):
            twice = next((r for i, r in enumerate(records) if r.key in [s.key for s in records[:i]]), None)
            if twice is not None:
                return f"{self.where}: {twice.key} was recorded twice in the {side} dump: number what differs"
        own, theirs = ({_at(record) for record in side} for side in (self.golden, self.actual))
        if own != theirs:
            return (
                f"{self.where}: {self.record_type} has no token layout, and was recorded by other ranks or for other "
                f"microbatches (golden: {_places(own)}; actual: {_places(theirs)}): {NO_LAYOUT}"
            )
        moved = next((r for r in self.actual if not self._alike(_at(r), whole=False)), None)
        if moved is not None:
            why = "has no token layout, and holds other samples in the two dumps"
            return f"{self.where}: {moved.key} {why}: {NO_LAYOUT}"
        return None

    def pairs(self) -> Iterator[Pair]:
        """Yield pairs of records of the same rank and microbatch."""
        own = {record.key: record for record in self.golden}
        yield from ((own[record.key], record) for record in self.actual if record.key in own)

    def lacking(self, names: Iterable[str]) -> Iterator[tuple[str, Header, Header]]:
        """Yield tensors that a record has on one side only: name, the record with it, the record without it."""
        for name in names:
            for golden, actual in self.pairs():
                if name in golden.tensors and name not in actual.tensors:
                    yield name, golden, actual
                elif name in actual.tensors and name not in golden.tensors:
                    yield name, actual, golden

    def places(self, names: Iterable[str]) -> tuple[dict[str, tuple[str, ...]], list[str]]:
        """Find the tensors that can be compared element by element.

        Returns:
            Actual record -> its tensors that can, and a problem for each of the others.
        """
        requested, known = [*names], {record.key: record for record in self.golden}
        chosen: dict[str, tuple[str, ...]] = {}
        problems: dict[str, str] = {}
        for record in self.actual:
            here = []
            for name in (name for name in requested if name in record.tensors):
                golden = known.get(record.key)
                if golden is not None and name not in golden.tensors:
                    continue  # see `lacking`
                why = self._why_not(name, golden, record)
                if why is None:
                    here.append(name)
                else:
                    problems.setdefault(name, f"{self.where}: {why}: {NO_LAYOUT}")
            if here:
                chosen[record.name] = tuple(here)
        return chosen, [*problems.values()]

    def _why_not(self, name: str, golden: Header | None, actual: Header) -> str | None:
        if golden is None:
            return f"{name} of {actual.key} has no places of tokens, and no golden record of the same place"
        shapes = [list(record.tensors[name][1]) for record in (golden, actual)]
        words = f"{name} of {actual.key}"
        if shapes[0] != shapes[1] or golden.layout(name) != actual.layout(name):
            return (
                f"{words} has the shape {shapes[0]} in the golden dump and {shapes[1]} in the actual one, and nothing "
                "tells which of its elements are the same"
            )
        if not self._alike(_at(actual), whole=True):
            return f"{words} has no places of tokens, and the microbatch holds other tokens in the two dumps"
        return None

    def _alike(self, at: Place, *, whole: bool) -> bool:
        """Return True if a microbatch holds the same samples, or the same tokens in all, as far as anything tells."""
        golden_layout, actual_layout = (side.get(at) for side in self.layouts)
        if golden_layout is None or actual_layout is None:
            return True
        names, alias = self.matching.golden_of, self.matching.alias
        if not whole:
            return {alias.get(key, key) for key in golden_layout.samples} == {
                names.get(key, key) for key in actual_layout.samples
            }
        mine = [(alias.get(key, key), *rest) for key, *rest in golden_layout.segments]
        other = [(names.get(key, key), *rest) for key, *rest in actual_layout.segments]
        return golden_layout.shape == actual_layout.shape and sorted(mine) == sorted(other)

    def apart(self) -> list[str]:
        """Return the tensors without a place for each token on either side; one-element shares are not among them."""
        names = dict.fromkeys(name for record in self.actual for name in record.tensors)
        records = (*self.golden, *self.actual)
        return [
            name
            for name in names
            if not any(name in record.tensors and _fits(record, name) for record in records)
        ]


def layouts_of(records: Iterable[Header]) -> dict[Place, Spans]:
    """Return the places of the tokens of each rank and microbatch, as far as any record tells."""
    found: dict[Place, Spans] = {}
    for record in records:
        if record.spans is not None and record.key.micro is not None:
            found.setdefault(_at(record), record.spans)
    return found


def layout_notes(record_type: str, records: Iterable[Header], *, bare: bool) -> Iterator[str]:
    """Yield notes on what is unknown about the tensors of a record type."""
    if bare:
        known = [*records]
        scalars = all(not shape for record in known for _, shape in record.tensors.values())
        how = (
            "each rank and microbatch was compared with the same one, and another split of the batch cannot be"
            if scalars
            else "it was compared element by element: differences have no sample and position, and other batch layouts "
            "cannot be compared"
        )
        yield f"{record_type} has no token layout, so {how}; {NO_LAYOUT}"
        records = known
    if record_type in UPDATE_TYPES:
        return
    for name in dict.fromkeys(name for record in records for name in record.tensors):
        if source_of(record_type, name) is None:
            near = nearest_tensor(record_type, name)
            nearest = f"the nearest is {near}" if near is not None else "and none is near"
            yield (
                f"{record_type}/{name} is not a tensor that regress knows, {nearest}; it was compared as "
                f"quantity {OTHER}"
            )


def is_share(record_type: str, name: str) -> bool:
    """Return True if a tensor is a microbatch's part of a sum."""
    return quantity_named(source_or_other(record_type, name).quantity).kind is Kind.SHARE


def _fits(record: Header, name: str) -> bool:
    """Return True if a tensor has a place for each token, or rows that its quantity knows."""
    shape = record.tensors[name][1]
    if is_share(record.key.record_type, name):
        return all(size == 1 for size in shape)
    if record.bare:
        return False
    known = source_of(record.key.record_type, name)
    # such tensors may have rows of loss tokens only
    hidden = known is not None and quantity_named(known.quantity).kind is Kind.HIDDEN
    if record.spans is None or hidden or isinstance(record.meta.get(name), str):
        return True
    return record.by_token(name)


def _at(record: Header) -> Place:
    return Place(rank=record.key.rank or 0, micro=record.key.micro or 0)


def _places(found: Iterable[Place]) -> str:
    known = sorted(found)
    some = ", ".join(f"rank {at.rank} microbatch {at.micro}" for at in known[:4])
    return some + (f" and {len(known) - 4} more" if len(known) > 4 else "")
