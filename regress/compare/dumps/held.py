"""Records in memory as a source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from regress.compare.alignment.keys import Key, key_of
from regress.compare.alignment.places import Places
from regress.compare.dumps.canonical import forget
from regress.compare.dumps.sides import HELD, Side, open_side
from regress.compare.updates.record_index import RecordIndex
from regress.dump.coordinates import Coordinates
from regress.dump.record import Record
from regress.dump.sources import Source
from regress.layout import TokenLayout


class HeldRecords(Source):
    """The records of an update.

    Args:
        placed: the same by place, in the samples of the golden values.
    """

    system = "regress"
    folder = Path("records in memory")

    def __init__(self, records: Sequence[Record], placed: RecordIndex, config: Mapping[str, Any]) -> None:
        self.config = config
        self._placed = placed
        self._records = {f"{record.type}/{number}": record for number, record in enumerate(records)}
        self._names = {key_of(record): name for name, record in reversed(self._records.items())}

    @property
    def entries(self) -> Mapping[str, tuple[str, Coordinates]]:
        """Type and place of each record."""
        return {name: (record.type, record.where) for name, record in self._records.items()}

    def read(self, name: str) -> Record:
        """Return one record."""
        return self._records[name]

    def name_of(self, key: Key) -> str:
        """Return the name of the first record at a place that has one."""
        return self._names[key]

    def places(self, name: str) -> Places:
        """Return the tokens at the places of a record that has a layout."""
        return self._placed.places(key_of(self._records[name]))

    def layouts(self, name: str) -> tuple[TokenLayout, TokenLayout]:
        """Return the layout of a record, and that of its rows of loss tokens."""
        key = key_of(self._records[name])
        return self._placed.layouts[key], self._placed.rows(key)

    def writes(self, stage: str, tensor: str | None = None) -> bool:
        """Return True: nothing limits what is recorded."""
        return True


@contextmanager
def held(golden: Side, actual: Side) -> Iterator[tuple[str, str]]:
    """Give two sources in memory names under which they are opened, as long as the context lasts."""
    names = f"memory:golden-{id(golden)}", f"memory:actual-{id(actual)}"
    HELD.update(zip(names, (golden, actual), strict=True))
    try:
        yield names
    finally:
        for name in names:
            del HELD[name]
        open_side.cache_clear()
        forget()
