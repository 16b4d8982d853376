"""The records of one update as the judge sees them: one at each place, its layout, and what is wrong with the set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from regress.compare.align import Key, by_place, canonical_layout
from regress.compare.coverage import QUANTITY, judge_coverage
from regress.compare.locate import Locator
from regress.compare.quantities import MICRO_STAGES, UPDATE_STAGES, source_of
from regress.compare.verdict import Place, Status, Verdict
from regress.dump.record import Record
from regress.errors import CompareError
from regress.layout import TokenFrame, TokenLayout


@dataclass(frozen=True)
class Plan:
    """Where records should be: ``(rank, microbatch)`` of those of microbatches, ranks of those of full tensors."""

    micros: tuple[tuple[int, int], ...]
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, planned: Iterable[tuple[int, int]]) -> Plan:
        """The plan in which every rank with a microbatch has full tensors."""
        micros = tuple(dict.fromkeys(planned))
        return cls(micros, tuple(dict.fromkeys(rank for rank, _ in micros)))

    def holds(self, key: Key) -> bool:
        """Whether a record belongs there."""
        if key.stage in MICRO_STAGES:
            return (key.rank, key.micro) in self.micros
        return key.stage not in UPDATE_STAGES or (key.rank in self.ranks and key.micro is None)


class PlacedRecords:
    """All records of an update, by stage, rank and microbatch.

    Attributes:
        layouts: of every record of tokens whose layout fits the frame; ``misfits`` says why the others' do not.
    """

    def __init__(self, records: Iterable[Record], frame: TokenFrame) -> None:
        self._all = by_place(records)
        self._frame = frame
        self.layouts: dict[Key, TokenLayout] = {}
        self.misfits: dict[Key, str] = {}
        for key, (record, *_) in self._all.items():
            if key.stage not in UPDATE_STAGES:
                try:
                    self.layouts[key] = canonical_layout(record, frame)
                except CompareError as error:
                    self.misfits[key] = str(error)

    def get(self, key: Key) -> Record | None:
        """The record at a place, the first where there are several."""
        found = self._all.get(key)
        return found[0] if found else None

    def of_stages(self, stages: Iterable[str]) -> list[Key]:
        """Keys of the records of some stages."""
        return [key for key in self._all if key.stage in stages]

    def holds(self, key: Key) -> bool:
        """Whether there is a record at a place."""
        return key in self._all

    def structure(
        self, planned: Callable[[Key], bool], stages: Sequence[str], place: Place, locator: Locator
    ) -> Iterator[Verdict]:
        """Verdicts on the set of records; ``stages`` are those whose tokens must be complete."""
        for key, found in self._all.items():
            if len(found) > 1:
                detail = f"{key} was recorded {len(found)} times; only the first record was compared"
                yield Verdict(Status.COVERAGE, QUANTITY, str(key), place, detail)
            if not planned(key):
                detail = f"{key} was recorded, but is not part of the plan"
                yield Verdict(Status.EXTRA, QUANTITY, str(key), place, detail)
            for name in found[0].tensors:
                if source_of(key.stage, name) is None:
                    detail = f"{key} holds a tensor {name!r} that belongs to no quantity"
                    yield Verdict(Status.EXTRA, QUANTITY, f"{key.stage}/{name}", place, detail)
        for stage in stages:
            layouts = {key: layout for key, layout in self.layouts.items() if key.stage == stage}
            yield judge_coverage(stage, layouts, self._frame, place, locator)
