"""Expected records of a run: ranks, microbatches, ranks that hold the same, and their records side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property

from regress.compare.alignment.keys import Key
from regress.compare.alignment.local_shard import Shard, local_shard
from regress.compare.quantities import LOSS_STAGES, MICRO_STAGES, UPDATE_STAGES
from regress.compare.updates.record_index import RecordIndex
from regress.dump.record import Record
from regress.errors import CompareError


@dataclass(frozen=True)
class Plan:
    """Expected places of the records of one optimizer update.

    Attributes:
        micros: every ``(rank, microbatch)`` that had to be computed. Each of the ranks has full tensors, or its shards.
        replicas: rank -> the rank whose tokens it repeats; the others have tokens of their own.
        parts: rank -> which part of the model it holds, such as its pipeline stage; the others hold part 0. Ranks of
            one part have tensors of the same names.
        without_loss: ranks that record no values of the loss, such as all but the last pipeline stage's.
        repeated: True if a stage has to repeat tensors of another, such as the log-probs beside the terms of the loss,
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
        if key.stage in LOSS_STAGES and key.rank in self.without_loss:
            return False
        if key.stage in MICRO_STAGES:
            return (key.rank, key.micro) in self._known
        return key.stage not in UPDATE_STAGES or (key.rank in self.ranks and key.micro is None)


@dataclass(frozen=True)
class Groups:
    """Records of several ranks, side by side."""

    placed: RecordIndex
    plan: Plan
    _shards: dict[tuple[Key, str], Shard] = field(default_factory=dict)

    def of(self, stage: str) -> list[list[Key]]:
        """Return groups of records with the same tokens, or of all full tensors and shards; ascending by rank."""
        found: dict[tuple[int | None, int | None], list[Key]] = {}
        for key in sorted(self.placed.of_stages([stage]), key=lambda key: (key.micro or 0, key.rank or 0)):
            whole = stage in UPDATE_STAGES
            found.setdefault((None, None) if whole else (self.plan.root(key.rank), key.micro), []).append(key)
        return [*found.values()]

    def held(self, name: str, keys: Iterable[Key]) -> Iterator[Shard]:
        """Yield the shards of a tensor that ranks hold; unusable shards become verdicts at their place."""
        for key in keys:
            record = self.record(key)
            if name in record.tensors and (key, name) not in self._shards:
                with suppress(CompareError):
                    self._shards[key, name] = local_shard(key, record, name)
            if (key, name) in self._shards:
                yield self._shards[key, name]

    def names(self, keys: Iterable[Key]) -> list[str]:
        """Return the tensors that any of the records holds."""
        return list(dict.fromkeys(name for key in keys for name in self.record(key).tensors))

    def layout(self, key: Key) -> object:
        """Return the token layout of a record, equal for records that hold the same; None without tokens."""
        layout = self.placed.layouts.get(key)
        return None if layout is None else (layout, self.placed.rows(key))

    def record(self, key: Key) -> Record:
        """Return the record at a place that has one."""
        record = self.placed.get(key)
        assert record is not None
        return record
