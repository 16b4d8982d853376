"""Tensors that a record has to hold, where ranks may hold different parts of the model."""

from __future__ import annotations

from regress.compare.alignment.keys import Key
from regress.compare.alignment.project import Projection
from regress.compare.quantities import MICRO_STAGES, OPEN_STAGES, Source, exclusive_stages, source_of
from regress.compare.updates.plan import Plan
from regress.compare.updates.record_index import RecordIndex


class Names:
    """Tensors that every record of an update holds or should hold."""

    def __init__(self, golden: Projection, placed: RecordIndex, plan: Plan) -> None:
        self._golden = golden
        self._placed = placed
        self._plan = plan
        self._of_parts: dict[tuple[str, int], set[str]] = {}

    @property
    def micro_stages(self) -> list[str]:
        """Stages that every microbatch has: those of the golden values, and those recorded anywhere."""
        names = [(quantity, name) for quantity, tensors in self._golden.truth.items() for name in tensors]
        recorded = {key.stage for key in self._placed.of_stages(MICRO_STAGES)}
        return [stage for stage in MICRO_STAGES if stage in exclusive_stages(names) | recorded]

    def of(self, key: Key) -> list[Source]:
        """Return the tensors that a record holds, in its order, then those that it should hold besides."""
        found = [source_of(key.stage, name) for name in self._recorded(key)]
        known = [source for source in found if source is not None]
        wanted = [*self._golden.stage(key.stage)]
        if not self._plan.repeated:
            told = {name for other in self._placed.of_stages([key.stage]) for name in self._recorded(other)}
            wanted = [source for source in wanted if source.primary or source.tensor in told]
        if key.stage in OPEN_STAGES and self._plan.divided:
            names = self._of_part(key.stage, self._plan.part(key.rank))
            wanted = [source for source in wanted if source.name in names]
        return list(dict.fromkeys([*known, *wanted]))

    def _of_part(self, stage: str, part: int) -> set[str]:
        """Return the names on any rank of a part of the model, or, without a record, all that nobody has."""
        if (stage, part) not in self._of_parts:
            keys = self._placed.of_stages([stage])
            mine = [key for key in keys if self._plan.part(key.rank) == part]
            recorded = {name for key in mine or keys for name in self._recorded(key)}
            golden = set(self._golden.truth.get(stage, {}))
            self._of_parts[stage, part] = recorded if mine else golden - recorded
        return self._of_parts[stage, part]

    def _recorded(self, key: Key) -> list[str]:
        record = self._placed.get(key)
        return [] if record is None else [*record.tensors]
