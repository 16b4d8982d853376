"""Verdicts from headers alone on one type: records, tensors, tokens and elements missing from one of two dumps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from regress.compare.alignment.element_names import Locator
from regress.compare.alignment.local_shard import others, uncovered
from regress.compare.alignment.record_keys import Key
from regress.compare.alignment.token_places import Mask
from regress.compare.coverage import QUANTITY, counted, judge_coverage, lost
from regress.compare.dumps.comparison_options import Options, Planned
from regress.compare.dumps.sample_matching import Matching
from regress.compare.dumps.untrained_parameters import is_zero, untrained
from regress.compare.quantities import (
    ADDED,
    LOSS_TYPES,
    METRICS,
    NEW,
    UPDATE_TYPES,
    source_or_other,
)
from regress.compare.record_header import Header
from regress.compare.update_records import Records
from regress.compare.verdicts.tensor_case import element
from regress.compare.verdicts.verdict import Status, Verdict
from regress.dump.coordinates import Place
from regress.dump.source_readers import Source
from regress.layout import SampleKey

_ARE = ("as is", "as are")
LEFT_OUT = "it was produced by no microbatch of the golden dump"
"""Words for tokens that a dump that may be wrong lacks."""


def one_sided(has: str, quantity: str, name: str, place: Place, detail: str) -> Verdict:
    """Return the verdict on what only the ``golden`` or the ``actual`` side has."""
    status = Status.MISSING if has == "golden" else Status.EXTRA
    return Verdict.fault(status, quantity, name, place, detail)


def unmatched(matching: Matching, place: Place, joined: str = "") -> Iterator[Verdict]:
    """Yield verdicts on samples without a counterpart.

    Args:
        joined: words for those that are several known ones; empty if there are none.
    """
    for has, keys in (("golden", matching.golden_only), ("actual", matching.actual_only)):
        if keys:
            detail = f"sample {keys[0][0]}/{keys[0][1]} is in the {has} dump only{others(len(keys), 'sample', _ARE)}"
            detail += f"; {joined}" if joined else ""
            yield replace(one_sided(has, QUANTITY, "samples", place, detail), over=len(keys), count=len(keys))


@dataclass(frozen=True)
class Half:
    """The records of one type of an update on one side.

    Attributes:
        has: the side in words, ``golden`` or ``actual``.
    """

    has: str
    side: Source
    records: Records
    record_type: str

    @cached_property
    def headers(self) -> list[Header]:
        """Its records, doubled ones included."""
        return [header for header in self.records.headers if header.key.record_type == self.record_type]

    @cached_property
    def names(self) -> dict[str, None]:
        """Names of its tensors."""
        return dict.fromkeys(name for header in self.headers for name in header.tensors)

    def having(self, name: str) -> list[Header]:
        """Return the records that have a tensor."""
        return [header for header in self.headers if name in header.tensors]

    def wrong(self) -> Iterator[tuple[Key, str]]:
        """Yield records that cannot be placed, and places that were recorded twice."""
        seen: dict[Key, str] = {}
        for header in self.headers:
            if header.problem:
                yield header.key, f"{self.has} dump: {header.problem}"
            if header.key in seen:
                twice = f"{header.key} was recorded twice ({seen[header.key]}, {header.name})"
                yield header.key, f"{self.has} dump: {twice}"
            seen[header.key] = header.name


@dataclass(frozen=True)
class RecordType:
    """The records of one type of an update in two dumps.

    Attributes:
        loss_tokens: finds the loss tokens ``[frame.size]`` of the golden side.
        copies: samples that only repeat others; they need not be anywhere.
        planned: receives notes, and defects of the golden records that prevent a comparison.
    """

    name: str
    golden: Half
    actual: Half
    copies: frozenset[SampleKey]
    place: Place
    options: Options
    planned: Planned
    loss_tokens: Callable[[], Mask | None] = lambda: None

    def verdicts(self) -> Iterator[Verdict]:
        """Yield verdicts on everything that is missing or superfluous."""
        requested = {name for name in self.golden.names | self.actual.names if self._asked(name)}
        if not requested:
            return
        if not self.golden.headers or not self.actual.headers:
            yield from self._absent()
            return
        yield from self._tensors(requested)
        wrong = [f"{self.place}: {detail}" for _, detail in self.golden.wrong()]
        self.planned.problems.extend(wrong)
        if wrong:
            return
        for key, detail in self.actual.wrong():
            yield Verdict.fault(Status.COVERAGE, QUANTITY, str(key), self.place, detail)
        if self.name in UPDATE_TYPES:
            yield from self._elements(requested)
        else:
            yield from self._tokens()

    def _asked(self, name: str) -> bool:
        source = source_or_other(self.name, name)
        return self.options.only.has(source.quantity, source.label)

    def _absent(self) -> Iterator[Verdict]:
        """Yield a verdict, or note why there is none, on a record type that one side lacks altogether."""
        half, side = self.golden, self.actual.side
        if not half.headers:
            half, side = self.actual, self.golden.side
        alone = f"{self.name} is in the {half.has} dump only"
        options = (side.config.get("debug") or {}).get("dump_options") or {}
        options = options if isinstance(options, Mapping) else {}
        if not side.writes(self.name) and side.system == "golden":
            note = f"{self.name} was not compared: {side.folder} has no golden values of it"
        elif not side.writes(self.name):
            reason = f"{side.system} writes none of the kind ({side.folder})"
            if side.config.get("capture"):
                reason = f"the trainer of {side.folder} showed none"
            note = f"{alone}: {reason}, so it was not compared"
        elif half is self.golden and half.side.system == "golden" and options and not options.get(self.name):
            note = f"{self.name} was not compared: {side.folder} was recorded without it"
        elif self.options.common:
            note = f"{alone}, so it was not compared"
        else:
            detail = (
                f"{self.name} was recorded in the {half.has} dump only: enable it for both, or compare what both have "
                "with --common"
            )
            yield one_sided(half.has, QUANTITY, self.name, self.place, detail)
            return
        self.planned.notes.append(note)

    def _tensors(self, requested: Collection[str]) -> Iterator[Verdict]:
        """Yield verdicts on tensors that only one side has."""
        golden, actual = self.golden, self.actual
        if self.options.common and not {*golden.names} & {*actual.names}:
            self.planned.problems.append(
                f"{self.place}: {self.name} has no tensor of the same name in both dumps "
                f"({next(iter(golden.names))} in the golden, {next(iter(actual.names))} in the actual one)"
            )
            return
        left_out = []
        for half, other in ((golden, actual), (actual, golden)):
            names = []
            for name in (name for name in half.names if name in requested and name not in other.names):
                holders = half.having(name)
                lacks = untrained(self.name, name, holders, half.side, other.side)
                if lacks is None and not other.side.writes(self.name, name):
                    self.planned.notes.append(
                        f"{self.name}/{name} is in the {half.has} dump only: {other.side.system} does not write it "
                        f"({other.side.folder}), so it was not compared"
                    )
                elif is_zero(self.name, name, holders, half.side):
                    self.planned.notes.append(
                        f"{self.name}/{name} is in the {half.has} dump only, and zero there, which is as good as none"
                    )
                elif self.options.common:
                    names.append(name)
                elif half is actual and self._is_new(name):
                    self.planned.notes.append(f"{self.name}/{name}: {NEW}")
                else:
                    source, detail = source_or_other(self.name, name), f"only in the {half.has} dump"
                    detail += "" if lacks is None else f"; the {other.has} trainer has {lacks}"
                    yield one_sided(half.has, source.quantity, source.label, self._place_of(name), detail)
            if names:
                more = others(len(names), "tensor", _ARE)
                left_out.append(
                    f"{self.name}/{names[0]} is in the {half.has} dump only{more}, so it was not compared"
                )
        self.planned.notes += left_out

    def _is_new(self, name: str) -> bool:
        """Return True for a metric, and of a case for a quantity that was added since it was recorded."""
        added = self.golden.side.system == "golden" and source_or_other(self.name, name).quantity in ADDED
        return self.name in METRICS or added

    def _place_of(self, name: str) -> Place:
        """Return the place of the one record of the actual dump that has a tensor, else that of the type."""
        holders = [record.key for record in self.actual.having(name)]
        if len(holders) != 1:
            return self.place
        return replace(self.place, rank=holders[0].rank, micro=holders[0].micro)

    def _tokens(self) -> Iterator[Verdict]:
        """Yield verdicts on missing, doubled and extra tokens; tensor by tensor where records differ."""
        if any(r.bare or r.meta.get("open") for r in (*self.golden.headers, *self.actual.headers)):
            return  # nothing tells which tokens lie here, so none can be said to be missing
        golden, actual = self._held(self.golden), self._held(self.actual)
        frame = self.golden.records.frame
        mine, its = counted(golden, frame), counted(actual, frame)
        locator, nothing = Locator(frame), np.zeros(frame.size, bool)
        twice = judge_coverage(self.name, golden, frame, self.place, locator, expected=nothing)
        if not twice.ok:
            self.planned.problems.append(
                f"{self.place}: golden dump: {self.name} of {twice.detail}; ranks that repeat each other's tokens need "
                "their mesh in the manifest (provenance=Provenance(mesh=...))"
            )
            return
        expected = mine > 0
        if self.golden.side.system == "golden" and self.name in LOSS_TYPES:
            loss = self.loss_tokens()  # a case has no values of other tokens
            expected &= True if loss is None else loss
        verdict = judge_coverage(self.name, actual, frame, self.place, locator, expected=expected)
        yield verdict
        extra = np.flatnonzero((its > 0) & (mine == 0))
        if extra.size:
            more = others(extra.size, "token", _ARE)
            detail = f"{locator.token(int(extra[0]))} is in the actual dump only{more}"
            detail += "" if self.golden.side.system == "golden" else f": {LEFT_OUT}"
            yield Verdict.fault(Status.EXTRA, QUANTITY, self.name, self.place, detail)
        if verdict.ok:
            yield from self._each_tensor(locator)

    def _each_tensor(self, locator: Locator) -> Iterator[Verdict]:
        """Yield verdicts on tensors that are absent at tokens where the golden records have them."""
        for name in (name for name in self.golden.names if name in self.actual.names and self._asked(name)):
            if len(self.actual.having(name)) == len(self.actual.headers):
                continue
            frame = self.golden.records.frame
            mine, its = (counted(self._held(half, name), frame) for half in (self.golden, self.actual))
            lost = np.flatnonzero((mine > 0) & (its == 0))
            if lost.size:
                source = source_or_other(self.name, name)
                detail = f"{locator.token(int(lost[0]))} has none{others(lost.size, 'token', _ARE)}"
                yield Verdict.fault(Status.MISSING, source.quantity, source.label, self.place, detail)

    def _held(self, half: Half, name: str | None = None) -> dict[Key, NDArray[np.int64]]:
        """Return the tokens of each record without copies, of ranks that repeat each other's tokens those of one."""
        first = 1 if self.name in LOSS_TYPES else 0  # nothing predicts the first token of a sample
        return half.records.once(self.name, name, first=first, without=self.copies)

    def _elements(self, requested: Collection[str]) -> Iterator[Verdict]:
        """Yield verdicts on elements of full tensors that no rank holds."""
        names = (name for name in self.golden.names if name in requested and name in self.actual.names)
        for name in names:
            holders = self.actual.having(name)
            layouts = [layout for record in holders if (layout := record.layout(name)) is not None]
            if len(layouts) < len(holders):
                continue  # a verdict where it is compared
            shape = layouts[0].shape
            missing = _missing(holders, name, shape)
            if missing is None or any(record.local for record in holders):
                continue
            count, at = missing
            if _missing(self.golden.having(name), name, shape) == missing:
                self.planned.problems.append(
                    f"{self.place}: {element(at, shape, f'{self.name}/{name}')} is held by no rank of either dump"
                    f"{others(count)}: record all ranks"
                )
                continue
            detail = f"{element(at, shape, name)} is held by no rank{others(count)}"
            yield lost(f"{self.name}/{name}", self.place, detail, count)


def _missing(holders: Iterable[Header], name: str, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the number of elements of a tensor that no record holds, and the first of them; None for none."""
    layouts = (record.layout(name) for record in holders)
    return uncovered(shape, [layout for layout in layouts if layout is not None and layout.shape == shape])
