"""The records of one update as the judge sees them: one at each place, its layout, and defects of the set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from regress.compare.alignment.keys import Key, by_place, canonical_layout, rows_layout
from regress.compare.alignment.locate import Locator
from regress.compare.alignment.places import Places, told_tokens
from regress.compare.quantities import LOSS_STAGES, MASKS, UPDATE_STAGES, Kind, quantity_named, source_of
from regress.compare.updates.coverage import QUANTITY, judge_coverage
from regress.compare.verdicts.case import Locate
from regress.compare.verdicts.verdict import Place, Status, Verdict
from regress.dump.record import Record
from regress.errors import CompareError
from regress.layout import TokenFrame, TokenLayout


class RecordIndex:
    """All records of an update, by stage, rank and microbatch.

    Attributes:
        layouts: layouts of the records of tokens that fit the frame; ``misfits`` holds the reasons for the others.
    """

    def __init__(self, records: Iterable[Record], frame: TokenFrame) -> None:
        self._all = by_place(records)
        self._frame = frame
        self._rows: dict[Key, TokenLayout] = {}
        self._places: dict[Key, Places] = {}
        self.layouts: dict[Key, TokenLayout] = {}
        self.misfits: dict[Key, str] = {}
        for key, (record, *_) in self._all.items():
            if key.stage not in UPDATE_STAGES:
                try:
                    layout = canonical_layout(record, frame)
                    self._rows[key] = rows_layout(record, frame) or layout
                    self.layouts[key] = layout
                except CompareError as error:
                    self.misfits[key] = str(error)

    def get(self, key: Key) -> Record | None:
        """Return the record at a place, the first where there are several."""
        found = self._all.get(key)
        return found[0] if found else None

    def one_each(self) -> dict[Key, Record]:
        """Return the record at each place; raise `CompareError` where there are several."""
        for key, found in self._all.items():
            if len(found) > 1:
                raise CompareError(
                    f"{key} was recorded {len(found)} times, so it has no one value; keep one record"
                )
        return {key: record for key, (record,) in self._all.items()}

    def of_stages(self, stages: Iterable[str]) -> list[Key]:
        """Return the keys of the records of some stages."""
        return [key for key in self._all if key.stage in stages]

    def holds(self, key: Key) -> bool:
        """Return True if there is a record at a place."""
        return key in self._all

    def rows(self, key: Key) -> TokenLayout:
        """Return the layout that rows of loss tokens follow at a place that has a layout."""
        return self._rows[key]

    def places(self, key: Key) -> Places:
        """Return the tokens at the places of a record that has a layout."""
        if key not in self._places:
            self._places[key] = Places.of(self.layouts[key], self._rows[key], self._frame.offsets)
        return self._places[key]

    @cached_property
    def loss_tokens(self) -> NDArray[np.bool_] | None:
        """Loss tokens as a mask ``[frame.size]``, as far as the records tell them; None if none of them does."""
        telling = (key for stage in MASKS for key in self.of_stages([stage]) if key in self.layouts)
        found = ((self._all[key][0], self.places(key)) for key in telling)
        return told_tokens(found, self._frame.size).loss

    def words(self, key: Key, quantity: str, shape: tuple[int, ...], locator: Locator) -> Locate | None:
        """Return canonical words for a whole tensor's elements; None where only indices name them."""
        if key not in self.layouts or quantity_named(quantity).kind is Kind.SHARE:
            return None
        found = self.tokens(key, shape)
        if found is not None:
            return locator.rows(found[0], shape[found[1] :], self.places(key).grid[1])
        if self.loss_tokens is None or len(shape) < 2:
            return None
        rows = self.places(key).loss_rows(self.loss_tokens)
        return locator.rows(rows, shape[-1:], None) if len(rows) == shape[-2] else None

    def tokens(self, key: Key, shape: tuple[int, ...]) -> tuple[NDArray[np.int64], int] | None:
        """Return the token of each row of a whole tensor with a place for each, and how many dimensions are places."""
        return self.places(key).lead(shape) if key in self.layouts else None

    def structure(
        self,
        planned: Callable[[Key], bool],
        root: Callable[[int | None], int],
        stages: Sequence[str],
        place: Place,
        locator: Locator,
        loss_tokens: NDArray[np.bool_] | None,
    ) -> Iterator[Verdict]:
        """Yield verdicts on the set of records.

        Args:
            planned: predicate of a place: True if a record belongs there.
            root: the rank whose tokens a rank repeats; they are counted once.
            stages: those whose tokens must be complete: all of them, or in the stages of the loss the loss tokens.
            loss_tokens: ``[frame.size]``; None where nothing tells them: all tokens that have a predecessor.
        """
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
            wanted = tokens_of(stage, self._frame, loss_tokens)
            yield judge_coverage(stage, self._once(stage, root), self._frame, place, locator, wanted=wanted)

    def _once(self, stage: str, root: Callable[[int | None], int]) -> dict[Key, NDArray[np.int64]]:
        """Return the tokens of a stage's records, of ranks that repeat each other's tokens those of one."""
        found: dict[tuple[int, int | None], Key] = {}
        for key in sorted((key for key in self.layouts if key.stage == stage), key=lambda key: key.rank or 0):
            found.setdefault((root(key.rank), key.micro), key)
        once = set(found.values())
        return {key: self.places(key).canonical for key in self.layouts if key in once}


def tokens_of(
    stage: str, frame: TokenFrame, loss_tokens: NDArray[np.bool_] | None
) -> NDArray[np.bool_] | None:
    """Return the tokens ``[frame.size]`` that the records of a stage must have together; None for all."""
    if stage not in LOSS_STAGES:
        return None
    if loss_tokens is not None:
        return loss_tokens
    predicted = np.ones(frame.size, bool)
    predicted[frame.offsets[:-1]] = False
    return predicted
