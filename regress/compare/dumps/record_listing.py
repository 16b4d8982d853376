"""Headers and small records of the sources that paths name, each read once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from functools import lru_cache

from regress.compare.alignment.token_places import RecordedTokens, recorded_tokens
from regress.compare.dumps.opened_dump import Named, open_side
from regress.compare.record_header import Header, header_of
from regress.dump.record import Record
from regress.dump.source_readers import Source
from regress.layout import SampleKey, TokenFrame

SMALL, KEPT, SEVERAL = 1 << 21, 1 << 25, 1 << 12
"""Most bytes of the tensors of a record that is kept once it was read, of all that are kept, and how many are kept."""

FEW = 1 << 14
"""Most tokens of a frame that is remembered by what was read of it."""


def headers(side: Source, names: Iterable[str]) -> list[Header]:
    """Return the headers of some records of a source."""
    return [header_of(name, record_of(side, name)) for name in names]


@lru_cache(maxsize=1024)
def header(source: Named, name: str) -> Header:
    """Return the header of a record of a source."""
    return header_of(name, record_of(open_side(source), name))


def recorded_by(
    source: Named, names: Iterable[str], index: Mapping[SampleKey, int], frame: TokenFrame
) -> RecordedTokens:
    """Return what some records of a source tell of the tokens of a frame.

    Args:
        index: the frame's number of each sample of that source.
    """
    read = _told_once if frame.size <= FEW else _recorded_tokens
    return read(source, tuple(names), tuple(index.items()), frame)


def _recorded_tokens(
    source: Named, names: tuple[str, ...], index: tuple[tuple[SampleKey, int], ...], frame: TokenFrame
) -> RecordedTokens:
    numbers = dict(index)
    records = ((record_of(open_side(source), name), header(source, name)) for name in names)
    placed = ((r, found.places(numbers, frame)) for r, found in records if found.spans is not None)
    return recorded_tokens(placed, frame.size)


_told_once = lru_cache(maxsize=256)(_recorded_tokens)


def record_of(side: Source, name: str) -> Record:
    """Return a record of a source; of the small ones, those that were asked for last are not read again."""
    return _records.get(side, name)


class _Records:
    """Small records that were read last."""

    def __init__(self) -> None:
        self._held: OrderedDict[tuple[Source, str], tuple[Record, int]] = OrderedDict()
        self._bytes = 0

    def get(self, side: Source, name: str) -> Record:
        key = (side, name)
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key][0]
        record = side.read(name)
        size = sum(array.nbytes for array in record.tensors.values())
        if size <= SMALL:
            self._held[key] = record, size
            self._bytes += size
            while len(self._held) > SEVERAL or self._bytes > KEPT:
                self._bytes -= self._held.popitem(last=False)[1][1]
        return record

    def clear(self) -> None:
        self._held.clear()
        self._bytes = 0


_records = _Records()


def by_step(side: Source) -> dict[int, list[str]]:
    """Return the names of the records of each step."""
    found: dict[int, list[str]] = {}
    for name, (_, where) in side.entries.items():
        found.setdefault(where.step, []).append(name)
    return found


def clear_caches() -> None:
    """Clear what was read: it may have changed since."""
    header.cache_clear()
    _records.clear()
    _told_once.cache_clear()
