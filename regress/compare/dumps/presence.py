"""Verdicts from headers alone on one stage: records, tensors, tokens and elements missing from one of two dumps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from regress.compare.alignment.keys import Key
from regress.compare.alignment.local_shard import others, uncovered
from regress.compare.alignment.locate import Locator
from regress.compare.alignment.places import Mask
from regress.compare.dumps.listing import Listed
from regress.compare.dumps.match import Matching
from regress.compare.dumps.selection import Selection
from regress.compare.dumps.sides import Side
from regress.compare.quantities import LOSS_STAGES, UPDATE_STAGES, source_or_other
from regress.compare.updates.coverage import QUANTITY, judge_coverage
from regress.compare.verdicts.case import element
from regress.compare.verdicts.verdict import Place, Status, Verdict
from regress.layout import SampleKey, TokenFrame

_ARE = ("as is", "as are")


def unmatched(matching: Matching, place: Place) -> Iterator[Verdict]:
    """Yield verdicts on samples without a counterpart."""
    for status, keys, where in (
        (Status.MISSING, matching.golden_only, "golden"),
        (Status.EXTRA, matching.actual_only, "actual"),
    ):
        if keys:
            detail = f"sample {keys[0][0]}/{keys[0][1]} is in the {where} dump only{others(len(keys), 'sample', _ARE)}"
            yield Verdict(
                status, QUANTITY, "samples", place, detail, multiple=math.inf, over=len(keys), count=len(keys)
            )


def one_sided(has: str, quantity: str, name: str, place: Place, detail: str) -> Verdict:
    """Return the verdict on what only the ``golden`` or the ``actual`` side has."""
    status = Status.MISSING if has == "golden" else Status.EXTRA
    return Verdict(status, quantity, name, place, detail, multiple=math.inf)


@dataclass(frozen=True)
class Stage:
    """The records of one stage of an update on both sides.

    Attributes:
        index, actual_index: sample of the one or the other side -> its number in the frame.
        loss_tokens: finds the loss tokens ``[frame.size]`` of the golden side.
        copies: samples that only repeat others; they need not be anywhere.
        problems: receives defects of the golden records that prevent a comparison.
    """

    name: str
    golden_side: Side
    actual_side: Side
    golden: Sequence[Listed]
    actual: Sequence[Listed]
    frame: TokenFrame
    index: Mapping[SampleKey, int]
    actual_index: Mapping[SampleKey, int]
    copies: frozenset[SampleKey]
    place: Place
    only: Selection
    common: bool = False
    notes: list[str] = field(default_factory=list)
    loss_tokens: Callable[[], Mask | None] = lambda: None
    problems: list[str] = field(default_factory=list)

    def verdicts(self) -> Iterator[Verdict]:
        """Yield verdicts on everything that is missing or superfluous."""
        wanted = {name for name in self._names(self.golden) | self._names(self.actual) if self._asked(name)}
        if not wanted:
            return
        if not self.golden or not self.actual:
            yield from self._absent()
            return
        yield from self._tensors(wanted)
        wrong = [f"{self.place}: {detail}" for _, detail in _wrong_records("golden", self.golden)]
        self.problems.extend(wrong)
        if wrong:
            return
        yield from self._records()
        if self.name in UPDATE_STAGES:
            yield from self._elements(wanted)
        else:
            yield from self._tokens()

    def _names(self, records: Iterable[Listed]) -> dict[str, None]:
        return dict.fromkeys(name for record in records for name in record.tensors)

    def _asked(self, name: str) -> bool:
        source = source_or_other(self.name, name)
        return self.only.has(source.quantity, source.label)

    def _absent(self) -> Iterator[Verdict]:
        """Yield a verdict, or note why there is none, on a stage that one side lacks altogether."""
        has, side = ("golden", self.actual_side) if self.golden else ("actual", self.golden_side)
        if not side.writes(self.name) and side.system == "golden":
            self.notes.append(f"{self.name} was not compared: {side.folder} has no golden values of it")
            return
        if not side.writes(self.name):
            where = f"{side.system} writes none of the kind ({side.folder})"
            if side.config.get("capture"):
                where = f"the trainer of {side.folder} showed none"
            self.notes.append(f"{self.name} is in the {has} dump only: {where}, so it was not compared")
            return
        options = (side.config.get("debug") or {}).get("dump_options") or {}
        options = options if isinstance(options, Mapping) else {}
        if self.golden and self.golden_side.system == "golden" and options and not options.get(self.name):
            self.notes.append(f"{self.name} was not compared: {side.folder} was recorded without it")
            return
        if self.common:
            self.notes.append(f"{self.name} is in the {has} dump only, so it was not compared")
            return
        detail = (
            f"{self.name} was recorded in the {has} dump only: enable it for both, or compare what both have with "
            "--common"
        )
        yield one_sided(has, QUANTITY, self.name, self.place, detail)

    def _tensors(self, wanted: Iterable[str]) -> Iterator[Verdict]:
        """Yield verdicts on tensors that only one side has."""
        golden_names, actual_names = self._names(self.golden), self._names(self.actual)
        if self.common and not {*golden_names} & {*actual_names}:
            self.problems.append(
                f"{self.place}: {self.name} has no tensor of the same name in both dumps "
                f"({next(iter(golden_names))} in the golden, {next(iter(actual_names))} in the actual one)"
            )
            return
        one: dict[str, list[str]] = {}
        for name in [*golden_names, *(name for name in actual_names if name not in golden_names)]:
            if name not in wanted or (name in golden_names and name in actual_names):
                continue
            side, has = (self.actual_side, "golden") if name in golden_names else (self.golden_side, "actual")
            source = source_or_other(self.name, name)
            if not side.writes(self.name, name) and not _has_state(side, self.name, name):
                self.notes.append(
                    f"{self.name}/{name} is in the {has} dump only: {side.system} does not write it ({side.folder}), "
                    "so it was not compared"
                )
            elif self.common:
                one.setdefault(has, []).append(name)
            else:
                detail = f"only in the {has} dump"
                yield one_sided(has, source.quantity, source.label, self._place_of(name), detail)
        for has, names in one.items():
            more = others(len(names), "tensor", _ARE)
            self.notes.append(
                f"{self.name}/{names[0]} is in the {has} dump only{more}, so it was not compared"
            )

    def _place_of(self, name: str) -> Place:
        """Return the place of the one record of the actual dump that has a tensor, else that of the stage."""
        holders = [record.key for record in self.actual if name in record.tensors]
        if len(holders) != 1:
            return self.place
        return replace(self.place, rank=holders[0].rank, micro=holders[0].micro)

    def _records(self) -> Iterator[Verdict]:
        """Yield verdicts on records that cannot be placed, and places that were recorded twice."""
        for key, detail in _wrong_records("actual", self.actual):
            yield Verdict(Status.COVERAGE, QUANTITY, str(key), self.place, detail, multiple=math.inf)

    def _tokens(self) -> Iterator[Verdict]:
        """Yield verdicts on missing, doubled and extra tokens; tensor by tensor where records differ."""
        if any(record.bare or record.meta.get("open") for record in (*self.golden, *self.actual)):
            return  # nothing tells which tokens lie here, so none can be said to be missing
        golden = self._held(self.golden, self.index, self.golden_side)
        actual = self._held(self.actual, self.actual_index, self.actual_side)
        mine, its = self._count(golden), self._count(actual)
        locator = Locator(self.frame)
        twice = judge_coverage(
            self.name, golden, self.frame, self.place, locator, wanted=np.zeros(self.frame.size, bool)
        )
        if not twice.ok:
            self.problems.append(
                f"{self.place}: golden dump: {self.name} of {twice.detail}; ranks that repeat each other's tokens need "
                "their mesh in the manifest (provenance=Provenance(mesh=...))"
            )
            return
        wanted = mine > 0
        if (
            self.golden_side.system == "golden" and self.name in LOSS_STAGES
        ):  # a case has no values of other tokens
            loss = self.loss_tokens()
            wanted &= True if loss is None else loss
        verdict = judge_coverage(self.name, actual, self.frame, self.place, locator, wanted=wanted)
        yield verdict
        extra = np.flatnonzero((its > 0) & (mine == 0))
        if extra.size:
            more = others(extra.size, "token", _ARE)
            detail = f"{locator.token(int(extra[0]))} is in the actual dump only{more}"
            yield Verdict(Status.EXTRA, QUANTITY, self.name, self.place, detail, multiple=math.inf)
        if verdict.ok:
            yield from self._each_tensor(locator)

    def _each_tensor(self, locator: Locator) -> Iterator[Verdict]:
        """Yield verdicts on tensors that are absent at tokens where the golden records have them."""
        everywhere = {name for record in self.actual for name in record.tensors}
        partial = [
            name
            for name in self._names(self.golden)
            if name in everywhere
            and self._asked(name)
            and any(name not in record.tensors for record in self.actual)
        ]
        for name in partial:
            mine, its = (
                self._count(self._held([r for r in records if name in r.tensors], index, side))
                for records, index, side in (
                    (self.golden, self.index, self.golden_side),
                    (self.actual, self.actual_index, self.actual_side),
                )
            )
            lost = np.flatnonzero((mine > 0) & (its == 0))
            if lost.size:
                source = source_or_other(self.name, name)
                detail = f"{locator.token(int(lost[0]))} has none{others(lost.size, 'token', _ARE)}"
                yield Verdict(
                    Status.MISSING, source.quantity, source.label, self.place, detail, multiple=math.inf
                )

    def _held(
        self, records: Iterable[Listed], index: Mapping[SampleKey, int], side: Side
    ) -> dict[Key, NDArray[np.int64]]:
        """Return the tokens of each record without copies, of ranks that repeat each other's tokens those of one."""
        found: dict[tuple[int, int | None], tuple[Key, NDArray[np.int64]]] = {}
        first = 1 if self.name in LOSS_STAGES else 0  # nothing predicts the first token of a sample
        for record in sorted(records, key=lambda record: (record.key.rank or 0, record.key.micro or 0)):
            if record.spans is not None:
                runs = [
                    np.arange(max(start, first), stop) + self.frame.offsets[index[key]]
                    for key, start, stop, _, _ in record.spans.segments
                    if key in index and key not in self.copies
                ]
                tokens = np.concatenate([np.zeros(0, np.int64), *runs])
                found.setdefault((side.root(record.key.rank or 0), record.key.micro), (record.key, tokens))
        return dict(found.values())

    def _count(self, found: Mapping[Key, NDArray[np.int64]]) -> NDArray[np.int64]:
        tokens = np.concatenate([np.zeros(0, np.int64), *found.values()])
        return np.bincount(tokens, minlength=self.frame.size)

    def _elements(self, wanted: Iterable[str]) -> Iterator[Verdict]:
        """Yield verdicts on elements of full tensors that no rank holds."""
        names = [name for name in self._names(self.golden) if name in wanted]
        known = self._names(self.actual)
        found = []
        for name in (name for name in names if name in known):
            holders = [record for record in self.actual if name in record.tensors]
            shapes = [record.layout(name) for record in holders]
            if any(shape is None for shape in shapes):
                continue  # a verdict where it is compared
            layouts = [shape for shape in shapes if shape is not None]
            missing = uncovered(layouts[0].shape, [s for s in layouts if s.shape == layouts[0].shape])
            if missing is not None and not any(record.local for record in holders):
                own = [
                    part for r in self.golden if name in r.tensors and (part := r.layout(name)) is not None
                ]
                if uncovered(layouts[0].shape, [s for s in own if s.shape == layouts[0].shape]) == missing:
                    self.problems.append(
                        f"{self.place}: {element(missing[1], layouts[0].shape, f'{self.name}/{name}')} is held "
                        f"by no rank of either dump{others(missing[0])}: record all ranks"
                    )
                    continue
                count, at = missing
                detail = f"{element(at, layouts[0].shape, name)} is held by no rank{others(count)}"
                found.append(
                    Verdict(
                        Status.COVERAGE,
                        QUANTITY,
                        f"{self.name}/{name}",
                        self.place,
                        detail,
                        multiple=math.inf,
                        over=count,
                    )
                )
        yield from found


def _has_state(side: Side, stage: str, name: str) -> bool:
    """Return True if an optimizer has this state of other parameters, so that it lacks it of this one."""
    kind = name.rpartition("/")[2]
    others = (
        tensor
        for record, (type, _) in side.entries.items()
        if type == stage == "optimizer"
        for tensor in side.read(record).tensors
    )
    return any(tensor.rpartition("/")[2] == kind for tensor in others)


def _wrong_records(side: str, records: Iterable[Listed]) -> Iterator[tuple[Key, str]]:
    """Yield records that cannot be placed, and places that were recorded twice."""
    seen: dict[Key, str] = {}
    for record in records:
        if record.problem:
            yield record.key, f"{side} dump: {record.problem}"
        if record.key in seen:
            yield (
                record.key,
                f"{side} dump: {record.key} was recorded twice ({seen[record.key]}, {record.name})",
            )
        seen[record.key] = record.name
