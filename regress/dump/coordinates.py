"""Coordinates of a record within a run, and the relative file name made from them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from regress.dump.record_types import RECORD_TYPES, type_index

_STEM = re.compile(r"step_(-\d{5,}|\d{6,})(?:_update(\d+))?(?:_rank(\d+))?(?:_micro(\d+))?", re.ASCII)


FIELDS = ("step", "update", "epoch", "mini_batch", "rank", "micro")
"""Fields of coordinates, in the order of the file formats."""


@dataclass(frozen=True)
class Place:
    """Where in a run: step, optimizer update within it, rank, and microbatch within the update.

    None where one does not apply; `update` also where a step has one update. Earlier places are smaller, and what has
    no number comes before what has one.
    """

    step: int | None = None
    update: int | None = None
    rank: int | None = None
    micro: int | None = None

    def __str__(self) -> str:
        """Return text such as ``step0/update1/rank0/micro2``, as in test ids."""
        return "/".join(f"{name}{value}" for name, value in self._numbers if value is not None)

    def __lt__(self, other: Place) -> bool:
        own, others = ([-1 if value is None else value for _, value in one._numbers] for one in (self, other))
        return own < others

    @property
    def words(self) -> str:
        """Words such as ``step 3 update 1``."""
        return " ".join(f"{name} {value}" for name, value in self._numbers if value is not None)

    @property
    def of_update(self) -> Place:
        """The update that it belongs to: step and update alone."""
        return Place(self.step, self.update)

    @property
    def counted(self) -> Place:
        """The same place with 0 for each None, as where one trainer counts what another has one of."""
        return Place(self.step or 0, self.update or 0, self.rank or 0, self.micro or 0)

    @property
    def _numbers(self) -> list[tuple[str, int | None]]:
        return [(name, getattr(self, name)) for name in ("step", "update", "rank", "micro")]


@dataclass(frozen=True)
class Coordinates(Place):
    """Place of a record, which has a step; `epoch` and `mini_batch` describe its update.

    They do not name files, because `update` counts both.
    """

    step: int = 0
    epoch: int | None = None
    mini_batch: int | None = None

    @property
    def stem(self) -> str:
        """File name without suffix: `step_000000[_update1][_rank0][_micro0]`."""
        parts = [f"step_{self.step:06d}"]
        for key in ("update", "rank", "micro"):
            value = getattr(self, key)
            if value is not None:
                parts.append(f"{key}{value}")
        return "_".join(parts)


def parse_stem(stem: str) -> Coordinates | None:
    """Return the coordinates in a file name without suffix, NexRL's `step_-00001_rank0_micro0` included, or None."""
    match = _STEM.fullmatch(stem)
    if match is None:
        return None
    update, rank, micro = (None if text is None else int(text) for text in match.group(2, 3, 4))
    return Coordinates(int(match[1]), update=update, rank=rank, micro=micro)


def dataflow_key(type: str, where: Coordinates) -> tuple[float, ...]:
    """Return the sort key in the order of computation: step, update, record type, microbatch, rank.

    A record without an update comes before all updates when its type belongs to the step (old log-probs)
    and after them otherwise, which for a step of one update is the order of the record types.
    """
    index = type_index(type)
    last = float("inf") if RECORD_TYPES[index].per_update else -1.0
    update = last if where.update is None else where.update
    micro, rank = (-1 if value is None else value for value in (where.micro, where.rank))
    return (where.step, update, index, micro, rank)
