"""Sources of recorded updates: a dump, a golden case, or what another system wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from regress.dump.coordinates import Coordinates, Place
from regress.dump.dump_location import Location
from regress.dump.record import Record
from regress.errors import CompareError


class UpdateSource(Protocol):
    """Source of records: the reader of a dump, a golden case, or the source of another system.

    Attributes:
        folder: where it lies.
    """

    @property
    def folder(self) -> Location: ...

    @property
    def config(self) -> Mapping[str, Any]:
        """Configuration of the run, nested; empty where unknown."""

    @property
    def entries(self) -> Mapping[str, tuple[str, Coordinates]]:
        """Name of each record -> its type and coordinates, in the order of computation."""

    def read(self, name: str) -> Record:
        """Read one record."""


def chosen(
    dump: UpdateSource, step: int | None, update: int | None, samples_of: str = "token_gradient"
) -> list[Place]:
    """Return the updates of a step and number that have records of a type, at least one; None: of all.

    Raises:
        CompareError: if there is none.
    """
    found = list(dict.fromkeys(at.of_update for type, at in dump.entries.values() if type == samples_of))
    if not found and samples_of != "token_gradient":
        raise CompareError(f"{dump.folder} has no {samples_of}: record the training step, too")
    if not found:
        raise CompareError(f"""{dump.folder} has no token gradients, which tell what the loss does: record them with
        record(..., token_gradient=True), or with the option token_gradient of our own trainer""")
    known = [place for place in found if step in (None, place.step) and update in (None, place.update)]
    if not known:
        names = ", ".join(place.words for place in found)
        raise CompareError(
            f"{dump.folder} has no token gradients of {Place(step, update).words}: choose one of {names}"
        )
    return known
