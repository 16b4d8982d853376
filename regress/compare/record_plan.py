"""Plan of what a replay has to record of an update: ranks, microbatches, and the ranks that hold the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from regress.compare.alignment.record_keys import Key
from regress.compare.quantities import LOSS_TYPES, MICRO_TYPES, UPDATE_TYPES


@dataclass(frozen=True)
class Plan:
    """Expected places of the records of one optimizer update.

    Attributes:
        micros: every ``(rank, microbatch)`` that had to be computed. Each of the ranks has full tensors, or its shards.
        replicas: rank -> the rank whose tokens it repeats; the others have tokens of their own.
        parts: rank -> which part of the model it holds, such as its pipeline stage; the others hold part 0. Ranks of
            one part have tensors of the same names.
        without_loss: ranks that record no values of the loss, such as all but the last pipeline stage's.
        repeated: True if a type has to repeat tensors of another, such as the log-probs beside the terms of the loss,
            where no record does.
    """

    micros: tuple[tuple[int, int], ...]
    replicas: Mapping[int, int] = field(default_factory=dict)
    parts: Mapping[int, int] = field(default_factory=dict)
    without_loss: frozenset[int] = frozenset()
    repeated: bool = True

    @classmethod
    def of(cls, planned: Plan | Iterable[tuple[int, int]]) -> Plan:
        """Return the given plan, or one of ranks that each hold the whole model and tokens of their own."""
        return planned if isinstance(planned, Plan) else cls(tuple(dict.fromkeys(planned)))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, in the order of their first microbatches."""
        return tuple(dict.fromkeys(rank for rank, _ in self.micros))

    @cached_property
    def _known(self) -> frozenset[tuple[int, int]]:
        return frozenset(self.micros)

    @property
    def divided(self) -> bool:
        """True if ranks hold different parts of the model, so that no rank has tensors of all names."""
        return len({self.part(rank) for rank in self.ranks}) > 1

    def root(self, rank: int | None) -> int:
        """Return the rank whose tokens a rank repeats, which may be itself."""
        return self.replicas.get(rank or 0, rank or 0)

    def part(self, rank: int | None) -> int:
        """Return the part of the model that a rank holds."""
        return self.parts.get(rank or 0, 0)

    def holds(self, key: Key) -> bool:
        """Return True if a record belongs there."""
        if key.record_type in LOSS_TYPES and key.rank in self.without_loss:
            return False
        if key.record_type in MICRO_TYPES:
            return (key.rank, key.micro) in self._known
        return key.record_type not in UPDATE_TYPES or (key.rank in self.ranks and key.micro is None)
