"""Part of a run in which records of some types are not kept."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from regress.dump.coordinates import Coordinates
from regress.dump.record import Record
from regress.dump.recorder import Collector
from regress.dump.taps import active_recorder, receiving


@contextmanager
def without(types: Collection[str]) -> Iterator[None]:
    """Keep records of some types out of the recording that is under way."""
    outer = active_recorder()
    with nullcontext() if outer is None else receiving(_Without(outer, types)):
        yield


class _Without(Collector):
    """Hands records on, but those of some types."""

    def __init__(self, outer: Collector, types: Collection[str]) -> None:
        super().__init__({})
        self._outer, self._left = outer, types

    def wanted(self, type: str, step: int) -> bool:
        return type not in self._left and self._outer.wanted(type, step)

    def add(
        self, type: str, where: Coordinates, tensors: Mapping[str, Any], meta: Mapping[str, Any] | None = None
    ) -> None:
        self._outer.add(type, where, tensors, meta)

    def put(self, record: Record, folder: str | None = None) -> None:
        self._outer.put(record, folder)

    def flush(self, where: Coordinates | None = None) -> None:
        self._outer.flush(where)
