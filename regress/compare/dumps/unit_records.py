"""The records of a unit: what was read, and the tokens at the places of their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from regress.compare.alignment.canonical_projection import Projection
from regress.compare.alignment.element_names import Locator
from regress.compare.alignment.token_overlap import Index, Part
from regress.compare.alignment.token_places import Mask, Placed, Places, placed
from regress.compare.diagnosis.failure_context import FailureContext
from regress.compare.dumps.canonical_values import golden_at, golden_update
from regress.compare.dumps.comparison_unit import Unit
from regress.compare.dumps.golden_source import text_of
from regress.compare.dumps.opened_dump import Side, open_side
from regress.compare.dumps.record_listing import header, record_of, recorded_by
from regress.compare.dumps.sample_matching import numbered
from regress.compare.quantities import RECOVERABLE, UPDATE_TYPES, QuantitySource
from regress.compare.update_records import words_at
from regress.compare.verdicts.tensor_case import Locate
from regress.dump.record import Record
from regress.errors import CompareError
from regress.layout import SampleKey


@dataclass(frozen=True)
class UnitRecords:
    """One actual record, and the golden records of the same tokens or tensors by name."""

    unit: Unit
    golden_side: Side
    actual_side: Side
    golden: Mapping[str, Record]
    actual: Record

    @classmethod
    def of(cls, unit: Unit) -> UnitRecords:
        """Read the records of a unit.

        Raises:
            DumpError: if a file cannot be read.
        """
        golden, actual = open_side(unit.golden), open_side(unit.actual)
        records = {name: record_of(golden, name) for name in unit.records}
        return cls(unit, golden, actual, records, record_of(actual, unit.record))

    @cached_property
    def hidden(self) -> Index:
        """Tokens whose gradient could not be recovered, on either side; their recorded value is 0 whatever it was."""
        if self.unit.planned:
            return np.zeros(0, np.int64)  # ranks of our engine have the exact derivatives
        lost = [np.zeros(0, np.int64)]
        for name, record in ((None, self.actual), *self.golden.items()):
            if RECOVERABLE.tensor in record.tensors:
                found = self.placed(name, RECOVERABLE, None)
                if not isinstance(found, str):
                    lost.append(found.part.rows[~found.part.array.reshape(-1).astype(bool)])
        tokens = np.unique(np.concatenate(lost))
        return tokens[tokens >= 0]

    def golden_rows(self, source: QuantitySource, loss: Mask | None) -> tuple[list[Part], bool, str | None]:
        """Return golden values as rows, True if these are those of loss tokens, and why some cannot be placed."""
        if self.unit.planned:
            part = self.update.part(source)
            return [part], part.rows.size != self.unit.frame.size, None
        names = [name for name, record in self.golden.items() if source.tensor in record.tensors]
        found = [self.placed(name, source, loss) for name in names]
        known = [one for one in found if not isinstance(one, str)]
        wrong = next((one for one in found if isinstance(one, str)), None)
        return [one.part for one in known], any(one.by_loss for one in known), wrong

    def golden_tokens(self) -> tuple[Index | None, Mask | None]:
        """Return golden token ids and loss tokens, both ``[frame.size]``, as far as records tell them."""
        if self.unit.planned:
            return self.update.locator.token_ids, self.update.known_loss_mask
        return recorded_by(self.unit.golden, self.unit.telling, self._indices[0], self.unit.frame)[:2]

    def actual_loss(self, loss: Mask | None) -> Mask | None:
        """Return the loss tokens that the actual records tell; of a plan those of the golden ones."""
        if self.unit.planned:
            return loss
        telling = self.unit.actual, self.unit.actual_telling
        return recorded_by(*telling, self._indices[1], self.unit.frame).loss

    def placed(
        self, name: str | None, source: QuantitySource, loss: Mask | None, *, rows_only: bool = False
    ) -> Placed | str:
        """Return a tensor of a golden record (None: the own one) as rows of tokens, or why it cannot be placed."""
        record = self.actual if name is None else self.golden[name]
        try:
            return placed(record, source, self._places(name), loss, rows_only=rows_only)
        except CompareError as error:
            return str(error)

    def words(self, source: QuantitySource, shape: tuple[int, ...]) -> Locate | None:
        """Return canonical words for the elements of the whole of an actual tensor; None where nothing tells them."""
        if not self.unit.frame.size:
            return None
        ids, loss = self.golden_tokens()
        locator = Locator(self.unit.frame, ids, text_of(self.golden_side, self.actual_side))
        return words_at(self._places(None), source.quantity, shape, locator, loss)

    def _places(self, name: str | None) -> Places:
        if name not in self._known_places:
            (mine, its), unit = self._indices, self.unit
            if name is not None:
                found = header(unit.golden, name).places(mine, unit.frame)
            else:
                found = header(unit.actual, unit.record).places(its, unit.frame)
            self._known_places[name] = found
        return self._known_places[name]

    @cached_property
    def _known_places(self) -> dict[str | None, Places]:
        return {}

    @cached_property
    def _indices(self) -> tuple[dict[SampleKey, int], dict[SampleKey, int]]:
        """Return the frame numbers of the golden and of the actual samples."""
        index = self.unit.frame.index
        return {**index, **numbered(self.unit.alias, index)}, numbered(self.unit.golden_of, index)

    @cached_property
    def update(self) -> Projection:
        """The golden update that the unit belongs to."""
        unit = self.unit
        if self.unit.planned:
            return golden_at(unit.golden, unit.actual, unit.place.of_update)
        return golden_update(unit.golden, unit.actual, unit.records[0])

    @cached_property
    def projection(self) -> Projection:
        """The golden update, restricted to the samples with a token here."""
        whole = self.update
        if self.unit.record_type in UPDATE_TYPES or self.unit.planned:
            return whole
        return whole.of_samples(sorted({*numbered(self.unit.golden_of, whole.frame.index).values()}))

    def context(self, source: QuantitySource, placed: Placed) -> FailureContext:
        """Return the failure context of a tensor of tokens."""
        golden, name = self.projection, self.unit.record
        index = numbered(self.unit.golden_of, golden.frame.index)
        layout, rows = header(self.unit.actual, name).layouts(index, golden.frame)
        return golden.context(source, placed.layout, layout, rows, rows_only=placed.by_loss)
