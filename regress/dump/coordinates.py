"""Coordinates of a record within a run, and the relative file name made from them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from regress.dump.record_types import RECORD_TYPES, type_index

_STEM = re.compile(r"step_(-\d{5,}|\d{6,})(?:_update(\d+))?(?:_rank(\d+))?(?:_micro(\d+))?", re.ASCII)


@dataclass(frozen=True)
class Coordinates:
    """Step, optimizer update within the step (None: the step has one), rank and microbatch within the update.

    `epoch` and `mini_batch` describe the update; they do not name files, because `update` counts both.
    """

    step: int
    update: int | None = None
    epoch: int | None = None
    mini_batch: int | None = None
    rank: int | None = None
    micro: int | None = None

    @property
    def stem(self) -> str:
        """File name without suffix: `step_000000[_update1][_rank0][_micro0]`."""
        parts = [f"step_{self.step:06d}"]
        for key in ("update", "rank", "micro"):
            value = getattr(self, key)
            if value is not None:
                parts.append(f"{key}{value}")
        return "_".join(parts)

    @property
    def place(self) -> str:
        """Text such as ``step0/update1/rank0/micro2``, as in test ids."""
        named = ((name, getattr(self, name)) for name in ("step", "update", "rank", "micro"))
        return "/".join(f"{name}{value}" for name, value in named if value is not None)


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
