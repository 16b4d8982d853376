"""Sources of recorded updates: a dump, a golden case, or what another system wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from regress.dump.coordinates import Coordinates
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


Place = tuple[int, int | None]
"""Step and number of an update."""


def chosen(
    dump: UpdateSource, step: int | None, update: int | None, samples_of: str = "token_gradient"
) -> list[Place]:
    """Return the updates of a step and number that have records of a type, at least one; None: of all.

    Raises:
        CompareError: if there is none.
    """
    found = list(
        dict.fromkeys((at.step, at.update) for type, at in dump.entries.values() if type == samples_of)
    )
    if not found and samples_of != "token_gradient":
        raise CompareError(f"{dump.folder} has no {samples_of}: record the training step, too")
    if not found:
        raise CompareError(f"""{dump.folder} has no token gradients, which tell what the loss does: record them with
        record(..., token_gradient=True), or with the option token_gradient of our own trainer""")
    known = [place for place in found if step in (None, place[0]) and update in (None, place[1])]
    if not known:
        names = ", ".join(_named(*place) for place in found)
        raise CompareError(
            f"{dump.folder} has no token gradients of {_named(step, update)}: choose one of {names}"
        )
    return known


def _named(step: int | None, update: int | None) -> str:
    return " ".join(
        f"{word} {value}" for word, value in (("step", step), ("update", update)) if value is not None
    )
