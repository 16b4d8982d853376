"""Records of an update that belong together: of the same tokens, or of the whole update."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from regress.compare.alignment.keys import Key
from regress.compare.alignment.local_shard import Shard, local_shard
from regress.compare.quantities import UPDATE_STAGES
from regress.compare.updates.plan import Plan
from regress.compare.updates.record_index import RecordIndex
from regress.dump.record import Record
from regress.errors import CompareError


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
