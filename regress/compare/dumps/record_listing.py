"""Headers and small records of sources, each read once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

from regress.compare.alignment.token_places import RecordedTokens, recorded_tokens
from regress.compare.dumps.opened_dump import Named, Side, kept_with_source, open_side
from regress.compare.record_header import Header, header_of
from regress.dump.record import Record
from regress.layout import SampleKey, TokenFrame

SMALL, KEPT, SEVERAL = 1 << 21, 1 << 25, 1 << 12
"""Most bytes of the tensors of a record that is kept once it was read, of all that a source keeps, and their number."""

FEW = 1 << 14
"""Most tokens of a frame that is remembered by what was read of it."""


def headers(side: Side, names: Iterable[str]) -> list[Header]:
    """Return the headers of some records of a source."""
    return [header_of(name, record_of(side, name)) for name in names]


@kept_with_source(1024)
def header(side: Side, name: str) -> Header:
    """Return the header of a record of a source."""
    return header_of(name, record_of(side, name))


def recorded_by(
    source: Named, names: Iterable[str], index: Mapping[SampleKey, int], frame: TokenFrame
) -> RecordedTokens:
    """Return what some records of a source tell of the tokens of a frame.

    Args:
        index: the frame's number of each sample of that source.
    """
    asked = tuple(names), tuple(index.items()), frame
    return _told_once(source, *asked) if frame.size <= FEW else _recorded_tokens(open_side(source), *asked)


def _recorded_tokens(
    side: Side, names: tuple[str, ...], index: tuple[tuple[SampleKey, int], ...], frame: TokenFrame
) -> RecordedTokens:
    numbers = dict(index)
    records = ((record_of(side, name), header(side, name)) for name in names)
    placed = ((r, found.places(numbers, frame)) for r, found in records if found.spans is not None)
    return recorded_tokens(placed, frame.size)


_told_once = kept_with_source(256)(_recorded_tokens)


def record_of(side: Side, name: str) -> Record:
    """Return a record of a source; of the small ones, those that were asked for last are not read again."""
    return _small_records(side).get(side, name)


@kept_with_source(1)
def _small_records(_: Side) -> _Records:
    return _Records()


class _Records:
    """Small records of a source that were read last."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, tuple[Record, int]] = OrderedDict()
        self._bytes = 0

    def get(self, side: Side, name: str) -> Record:
        if name in self._held:
            self._held.move_to_end(name)
            return self._held[name][0]
        record = side.read(name)
        size = sum(array.nbytes for array in record.tensors.values())
        if size <= SMALL:
            self._held[name] = record, size
            self._bytes += size
            while len(self._held) > SEVERAL or self._bytes > KEPT:
                self._bytes -= self._held.popitem(last=False)[1][1]
        return record


def by_step(side: Side) -> dict[int, list[str]]:
    """Return the names of the records of each step."""
    found: dict[int, list[str]] = {}
    for name, (_, where) in side.entries.items():
        found.setdefault(where.step, []).append(name)
    return found
