"""The units of one optimizer update: records of the two dumps that hold the same tokens or tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeAlias

from regress.compare.alignment.token_places import Mask
from regress.compare.alignment.token_spans import Spans
from regress.compare.dumps.comparison_options import Options, Planned
from regress.compare.dumps.comparison_unit import Unit
from regress.compare.dumps.elementwise_comparison import Elementwise, is_share, layout_notes, layouts_of
from regress.compare.dumps.loss_shares import ShareUnit
from regress.compare.dumps.microbatch_groups import Shares, once
from regress.compare.dumps.opened_dump import Side
from regress.compare.dumps.record_listing import recorded_by
from regress.compare.dumps.sample_matching import Matching, numbered
from regress.compare.missing_records import Half, RecordType, one_sided
from regress.compare.quantities import (
    MASKS,
    STEP_TYPES,
    UPDATE_TYPES,
    source_or_other,
)
from regress.compare.record_header import Header, has_rows_of_loss_tokens
from regress.compare.single_dump_checks import Alone
from regress.compare.single_dump_units import single_units
from regress.compare.update_records import Holders, Records, likeliest
from regress.dump.coordinates import Place
from regress.dump.record_types import RECORD_TYPES
from regress.layout import SampleKey, TokenFrame

TOLD = ("forward_data", "is_loss_debug", "batch_inputs")
"""Records that tell loss tokens or token ids."""

InformativeRecords: TypeAlias = dict[SampleKey, list[tuple[int, int, str]]]
"""Sample -> the records that hold it: type, number and name."""


@dataclass(frozen=True)
class UpdateUnits:
    """One update of both dumps.

    Attributes:
        golden, actual: the records, without those of the rollouts.
        lengths: tokens of each golden sample.
    """

    paths: tuple[str, str]
    sides: tuple[Side, Side]
    place: Place
    golden: Sequence[Header]
    actual: Sequence[Header]
    matching: Matching
    lengths: Mapping[SampleKey, int]
    options: Options

    @cached_property
    def frame(self) -> TokenFrame:
        """The golden samples of the update."""
        here = dict.fromkeys(key for record in self.golden for key in record.samples)
        actual = dict.fromkeys(key for record in self.actual for key in record.samples)
        here |= dict.fromkeys(
            self.matching.golden_of[key] for key in actual if key in self.matching.golden_of
        )
        own = [key for key in here if key not in self.matching.alias]
        longest = {key: self.lengths.get(key, 0) for key in own}
        for key in actual:
            to = self.matching.golden_of.get(key)
            if to in longest:
                longest[to] = max(longest[to], self.lengths.get(key, 0))
        return TokenFrame(tuple(own), tuple(longest[key] for key in own))

    def plan(self, planned: Planned) -> None:
        """Add the units, and verdicts that need headers only."""
        if not self.options.only.patterns:
            self._lost(planned)
        for record_type in (one.name for one in RECORD_TYPES if one.name != "trajectory"):
            golden, actual = (
                [record for record in side if record.key.record_type == record_type]
                for side in (self.golden, self.actual)
            )
            if all(record.meta.get("derived") for record in (*golden, *actual)):
                continue  # neither side recorded any
            if {"derived", "sampler"} <= {key for record in (*golden, *actual) for key in record.meta}:
                planned.notes.append(
                    f"{record_type}: datums hold the sampler's log-probs, the trainer's own were not compared"
                )
                continue
            if record_type in STEP_TYPES and not (golden and actual) and self._repeated(record_type):
                planned.notes.append(
                    f"{record_type} is in one dump only; those of the loss (is_loss_debug) were compared"
                )
                continue
            if any(record.meta.get("unplaced") for record in (*golden, *actual)) and record_type != "loss":
                why = "nothing tells whose rows they are"
                planned.problems.append(f"{self.place}: {record_type} cannot be compared: {why}")
                continue
            self._compare(record_type, golden, actual, planned)
        planned.units += single_units(
            self.paths, self.sides[1], self.golden, self.actual, self.place, self.options.only
        )

    def _lost(self, planned: Planned) -> None:
        """Add missing records of ranks of the actual mesh; where the golden dump lacks the same, add a problem."""
        alone = [
            Alone(side, records, self.place)
            for side, records in zip(self.sides, (self.golden, self.actual), strict=True)
        ]
        golden, actual = ([*one.lost_ranks(), *one.exchanged()] for one in alone)
        known = {verdict.detail for verdict in golden}
        for verdict in actual:
            if verdict.detail not in known:
                planned.verdicts.append(verdict)
            else:
                planned.problems.append(
                    f"{self.place}: in both dumps {verdict.detail}: give dumps with the records of all ranks"
                )

    def _compare(
        self, record_type: str, golden: Sequence[Header], actual: Sequence[Header], planned: Planned
    ) -> None:
        """Add the units of one record type."""
        places = Elementwise(record_type, str(self.place), golden, actual, self._layouts, self.matching)
        if golden and actual and places.bare and (why := places.refusal()) is not None:
            planned.problems.append(why)
            return
        known = len(planned.problems)
        planned.verdicts += self._of_record_type(record_type, planned).verdicts()
        if not golden or not actual or (len(planned.problems) > known and record_type not in UPDATE_TYPES):
            return
        planned.notes += layout_notes(record_type, (*golden, *actual), bare=places.bare)
        if record_type in UPDATE_TYPES:
            planned.units += self._whole(record_type, golden, actual, planned)
            return
        apart = {*places.apart()}
        names = dict.fromkeys(name for record in actual for name in record.tensors)
        placed = tuple(name for name in names if name not in apart and not is_share(record_type, name))
        if placed:
            planned.units += self._tokens(record_type, golden, actual, placed)
        planned.units += self._elementwise(places, apart, planned)
        planned.units += self._shares(record_type, golden, actual, frozenset(apart), planned)

    def _elementwise(self, places: Elementwise, names: Iterable[str], planned: Planned) -> Iterator[Unit]:
        """Yield units for tensors without a token layout."""
        only = self.options.only
        sources = [(name, source_or_other(places.record_type, name)) for name in sorted(names)]
        asked = [name for name, source in sources if only.has(source.quantity, source.label)]
        chosen, problems = places.places(asked)
        planned.problems += problems
        here = {name for record in places.golden for name in record.tensors}
        for name, has, _ in places.lacking(name for name in asked if name in here):
            source, side = (
                source_or_other(places.record_type, name),
                "golden" if has in places.golden else "actual",
            )
            where = replace(self.place, rank=has.key.rank, micro=has.key.micro)
            found = one_sided(side, source.quantity, source.label, where, f"only in the {side} dump")
            planned.verdicts.append(found)
        for golden, actual in places.pairs():
            if actual.name in chosen:
                unit = self._unit(places.record_type, actual, [golden])
                yield replace(unit, tensors=chosen[actual.name], elementwise=True)

    @cached_property
    def _layouts(self) -> tuple[Mapping[Place, Spans], Mapping[Place, Spans]]:
        return layouts_of(self.golden), layouts_of(self.actual)

    def _repeated(self, record_type: str) -> bool:
        """Return True if both sides repeat the values of a record type beside those of the loss."""
        return all(
            any(
                record.key.record_type == "is_loss_debug" and record_type in record.tensors for record in side
            )
            for side in (self.golden, self.actual)
        )

    def _of_record_type(self, name: str, planned: Planned) -> RecordType:
        golden, actual = (
            Half(has, side, records, name)
            for has, side, records in zip(("golden", "actual"), self.sides, self._records, strict=True)
        )
        return RecordType(
            name, golden, actual, self._copies, self.place, self.options, planned, self._loss_tokens
        )

    def _loss_tokens(self) -> Mask | None:
        telling = [record.name for record in self.golden if record.key.record_type in TOLD]
        return recorded_by(self.paths[0], telling, self._indices[0], self.frame).loss

    @cached_property
    def _records(self) -> tuple[Records, Records]:
        """The records of both sides, their tokens numbered as in the frame."""
        both = zip((self.golden, self.actual), self.sides, self._indices, strict=True)
        golden, actual = (
            Records(headers, side.read, self.frame, partial(_root, side), index)
            for headers, side, index in both
        )
        return golden, actual

    @cached_property
    def _indices(self) -> tuple[dict[SampleKey, int], dict[SampleKey, int]]:
        """Return the frame's number of each golden and of each actual sample."""
        index = self.frame.index
        return {**index, **numbered(self.matching.alias, index)}, numbered(self.matching.golden_of, index)

    @cached_property
    def _copies(self) -> frozenset[SampleKey]:
        """Samples that only repeat others: of a golden sample's actual copies the first counts."""
        firsts = {to: key for key, to in reversed([*self.matching.golden_of.items()])}
        return frozenset({*self.matching.alias} | {*self.matching.golden_of} - {*firsts.values()})

    def _whole(
        self, record_type: str, golden: Sequence[Header], actual: Sequence[Header], planned: Planned
    ) -> Iterator[Unit]:
        problems = {record.local for record in (*golden, *actual)}
        if len(problems) > 1:
            why = next(text for text in sorted(problems, reverse=True) if text)
            planned.problems.append(f"{self.place}: {record_type} cannot be compared: {why}")
            return
        local = bool(*problems)
        planned.notes += [f"{record_type}: {text}" for text in problems if text]
        ranks = {record.key.rank for record in actual}
        own = {(record.key.rank, record.key.micro): [record] for record in golden}
        holders = Holders(golden)
        for record in actual:
            same = own.get((record.key.rank, record.key.micro), []) if local else holders.of(record)
            if same:
                yield self._unit(record_type, record, same)
        first: dict[str, Header] = {}
        for g in sorted(golden, key=lambda g: g.key.rank or 0):
            contents = repr((sorted(g.tensors.items()), g.shards))
            if contents in first and g.key.rank not in ranks and not local:
                unit = self._unit(record_type, actual[0], [g])
                yield replace(unit, suffix=f" (golden rank {g.key.rank})")
            first.setdefault(contents, g)

    def _tokens(
        self, record_type: str, golden: Sequence[Header], actual: Sequence[Header], names: tuple[str, ...]
    ) -> Iterator[Unit]:
        holders = self._by_sample(golden)
        for record in actual:
            samples = self._golden_samples(record)
            same = {g.name: g for key in samples for g in holders.get(key, ())}
            if same:
                order = likeliest(same.values(), record)
                yield replace(self._token_unit(record_type, record, order), tensors=names)

    def _token_unit(self, record_type: str, record: Header, order: Sequence[Header]) -> Unit:
        """Return the unit of a record of tokens; its rows of loss tokens are counted over all of its samples."""
        matching = self.matching
        rows = any(has_rows_of_loss_tokens(g) for g in (record, *order))
        known = self._golden_samples(record)
        if rows:
            others = (matching.alias.get(key, key) for g in order for key in g.samples)
            known = list(dict.fromkeys([*known, *others]))
        names = {key: to for key in record.samples if (to := matching.golden_of.get(key)) is not None}
        lengths = {key: self._lengths[key] for key in known}
        for key in record.samples:
            if key not in names:
                names[key] = (f"{key[0]} (actual only)", key[1])
                lengths[names[key]] = self.lengths[key]
        alias = {key: to for to in lengths for key in self._repeats.get(to, ())}
        telling = (self._telling_golden.get(key, ()) for key in lengths)
        actual_told = (self._telling_actual.get(key, ()) for key in names)
        return replace(
            self._unit(record_type, record, order),
            frame=TokenFrame(tuple(lengths), tuple(lengths.values())),
            golden_of=names,
            alias=alias,
            telling=_in_order(telling),
            actual_telling=_in_order(actual_told),
        )

    @cached_property
    def _repeats(self) -> dict[SampleKey, list[SampleKey]]:
        """Copies of each golden sample."""
        found: dict[SampleKey, list[SampleKey]] = {}
        for key, to in self.matching.alias.items():
            found.setdefault(to, []).append(key)
        return found

    @cached_property
    def _telling_golden(self) -> InformativeRecords:
        return _informative_records(self.golden, self.matching.alias)

    @cached_property
    def _telling_actual(self) -> InformativeRecords:
        return _informative_records(self.actual, {})

    @cached_property
    def _lengths(self) -> dict[SampleKey, int]:
        return dict(zip(self.frame.samples, self.frame.lengths, strict=True))

    def _unit(self, record_type: str, record: Header, same: Iterable[Header]) -> Unit:
        place = replace(self.place, rank=record.key.rank, micro=record.key.micro)
        names = tuple(g.name for g in same)
        return Unit(
            *self.paths,
            record.name,
            names,
            place,
            record_type,
            bounds=self.options.bounds,
            only=self.options.only,
        )

    def _golden_samples(self, record: Header) -> list[SampleKey]:
        found = (self.matching.golden_of.get(key) for key in record.samples)
        return list(dict.fromkeys(key for key in found if key is not None))

    def _by_sample(self, records: Iterable[Header]) -> dict[SampleKey, list[Header]]:
        """Return the golden records that have a token of each golden sample."""
        found: dict[SampleKey, list[Header]] = {}
        for record in records:
            for key in dict.fromkeys(self.matching.alias.get(key, key) for key in record.samples):
                found.setdefault(key, []).append(record)
        return found

    def _shares(
        self,
        record_type: str,
        golden: Sequence[Header],
        actual: Sequence[Header],
        without: frozenset[str],
        planned: Planned,
    ) -> Iterator[ShareUnit]:
        """Yield the unit of the losses of a record type, if it has any."""
        debug = [record for record in self.golden if record.key.record_type == "is_loss_debug"]
        own, theirs = once(golden, self.sides[0]), once(actual, self.sides[1])
        shares = Shares(record_type, own, theirs, debug, self.place, self.matching)
        if not shares:
            return
        found = shares.single() if self.sides[0].system == "golden" and shares.summable() else shares.groups()
        groups = tuple(found)
        if any(record.meta.get("own_mean") for record in (*golden, *actual)):
            whole = tuple(group for group in groups if len(group.golden) == len(group.actual) == 1)
            if len(whole) < len(groups) and self.options.only.has("loss", "loss"):
                planned.problems.append(
                    f"{self.place}: losses of {len(groups) - len(whole)} groups of microbatches cannot be compared: "
                    "they are means of microbatches that hold other samples in the two dumps, and means do not add up"
                )
            groups = whole
        bounds, only = self.options.bounds, self.options.only
        yield ShareUnit(*self.paths, record_type, groups, shares.terms(), bounds, only, without)


def _informative_records(
    records: Iterable[Header], names: Mapping[SampleKey, SampleKey]
) -> InformativeRecords:
    """Return the records that tell loss tokens or ids, by sample."""
    found: InformativeRecords = {}
    for number, record in enumerate(records):
        useful = MASKS.get(record.key.record_type) in record.tensors or "input_ids" in record.tensors
        if record.key.record_type in TOLD and useful:
            for key in dict.fromkeys(names.get(key, key) for key in record.samples):
                found.setdefault(key, []).append((TOLD.index(record.key.record_type), number, record.name))
    return found


def _in_order(orders: Iterable[Iterable[tuple[int, int, str]]]) -> tuple[str, ...]:
    return tuple(name for _, _, name in sorted({found for several in orders for found in several}))


def _root(side: Side, rank: int | None) -> int:
    return side.root(rank or 0)
