"""Planning of a comparison from headers; only tensors that tell samples apart are read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from regress.compare.dumps.comparison_options import AnyUnit, Options, Planned
from regress.compare.dumps.comparison_unit import Unit
from regress.compare.dumps.golden_source import GoldenSide
from regress.compare.dumps.joined_samples import joined_samples, joined_words, named_as
from regress.compare.dumps.opened_dump import Side, open_side
from regress.compare.dumps.record_listing import by_step, headers
from regress.compare.dumps.rollout_comparison import RolloutUnit
from regress.compare.dumps.sample_contents import samples_of, values_of
from regress.compare.dumps.sample_matching import Matching, Sample, match_samples
from regress.compare.dumps.update_numbering import counted_otherwise, numbered_as
from regress.compare.missing_records import one_sided, unmatched
from regress.compare.quantities import MICRO_TYPES
from regress.compare.record_header import Header, lengths_of
from regress.compare.single_dump_units import SingleUnit
from regress.compare.update_units import UpdateUnits
from regress.compare.updates.trajectory_judge import QUANTITY as TRAJECTORY
from regress.dump.coordinates import Place
from regress.errors import CompareError

_REPEATED = (
    "only repeat others without a gradient of their own ({}), as rows do that fill a batch up, and were not "
    "compared"
)
_AMBIGUOUS = (
    "are identical rollouts with different values ({}); they were paired so that the values are closest, which may "
    "hide an exchange among them"
)


def plan_units(golden: str, actual: str, options: Options | None = None) -> Planned:
    """Plan the units of a comparison.

    Raises:
        DumpError: if one of the two is not a dump, or a damaged one.
        CompareError: if they have no step in common.
    """
    asked = options or Options()
    golden_side, actual_side = open_side(golden), open_side(actual)
    planned = Planned()
    if isinstance(golden_side, GoldenSide) or counted_otherwise(golden_side, actual_side):
        golden_side, planned.notes = numbered_as(golden_side, actual_side)
    names = by_step(golden_side), by_step(actual_side)
    for step in _steps(golden_side, actual_side, asked, planned):
        records = headers(golden_side, names[0][step]), headers(actual_side, names[1][step])
        _Step((golden, actual), (golden_side, actual_side), step, records, asked, planned).plan()
    notes = [
        *(f"golden dump: {note}" for note in golden_side.notes),
        *(f"actual dump: {note}" for note in actual_side.notes),
    ]
    planned.notes = list(dict.fromkeys([*notes, *planned.notes]))
    return planned


def steps_of(side: Side) -> set[int]:
    """Return the steps that a dump has records of."""
    return {where.step for _, where in side.entries.values()}


def _steps(golden_side: Side, actual_side: Side, options: Options, planned: Planned) -> list[int]:
    known, other = steps_of(golden_side), steps_of(actual_side)
    if options.steps is not None:
        first, last = options.steps
        known, other = ({step for step in steps if first <= step <= last} for steps in (known, other))
    if not known & other:
        asked = "" if options.steps is None else " among those asked for"
        raise CompareError(f"""{golden_side.folder} and {actual_side.folder} have no step in common{asked} (golden:
        {_spans(steps_of(golden_side))}; actual: {_spans(steps_of(actual_side))}), so nothing can be compared; steps
        count from 0, see --step""")
    if options.steps is not None:
        for step in sorted({*options.steps} - known - other):
            planned.problems.append(f"step {step} was asked for, but neither dump has it")
    for step in sorted(known ^ other):
        where = "golden" if step in known else "actual"
        if options.steps is None:
            planned.notes.append(f"step {step} is only in the {where} dump and was not compared")
        else:
            planned.problems.append(f"step {step} was asked for, but only the {where} dump has it")
    return sorted(known & other)


def _spans(steps: Iterable[int]) -> str:
    found = sorted(steps)
    if len(found) > 2 and found[-1] - found[0] == len(found) - 1:
        return f"steps {found[0]} to {found[-1]}"
    return f"step{'s' * (len(found) > 1)} {', '.join(map(str, found))}" if found else "none"


@dataclass(frozen=True)
class _Step:
    """One step of both dumps."""

    paths: tuple[str, str]
    sides: tuple[Side, Side]
    step: int
    records: tuple[list[Header], list[Header]]
    options: Options
    planned: Planned

    def plan(self) -> None:
        golden, actual = self.records
        known, other = samples_of(self.sides[0], golden), samples_of(self.sides[1], actual)
        values = values_of(self.sides[0], golden, self.sides[1], actual)
        matching = match_samples(known, other, values)
        matching = self._reportable(matching, golden, actual)
        self._tell(matching, self._joined(matching, [*known, *other]))
        self._rollouts(golden, actual, matching)
        lengths = {s.key: len(s.content or ()) for s in (*other, *known)}
        for key, length in lengths_of([*actual, *golden]).items():
            lengths[key] = max(lengths.get(key, 0), length)
        for number, own, actual_side in self._updates(golden, actual):
            UpdateUnits(
                self.paths,
                self.sides,
                Place(self.step, number),
                [r for r in golden if r.key.record_type != "trajectory" and r.update == own],
                [r for r in actual if r.key.record_type != "trajectory" and r.update == actual_side],
                matching,
                lengths,
                self.options,
            ).plan(self.planned)

    def _reportable(self, matching: Matching, golden: Sequence[Header], actual: Sequence[Header]) -> Matching:
        """Return the matching without samples that only rollouts mention, where the other side has none."""
        kept = []
        for keys, mine, other, side in (
            (matching.golden_only, golden, actual, self.sides[1]),
            (matching.actual_only, actual, golden, self.sides[0]),
        ):
            computed = {key for record in mine for key in record.samples}
            rollouts = any(record.key.record_type == "trajectory" for record in other)
            if not rollouts and any(r.bare or r.problem for r in other) and not any(r.samples for r in other):
                computed = set()  # that nothing tells its samples is said of its records
            if not any(side.writes(record_type) for record_type in MICRO_TYPES):
                computed = set()  # such as a checkpoint, which has none
            kept.append(tuple(key for key in keys if rollouts or key in computed))
        return replace(matching, golden_only=kept[0], actual_only=kept[1])

    def _updates(
        self, golden: Sequence[Header], actual: Sequence[Header]
    ) -> list[tuple[int | None, int, int]]:
        """Return number, golden and actual number of each update; a dump that cannot tell them holds the last one."""
        own, actual_side = (
            sorted({r.update for r in side if r.key.record_type != "trajectory"}) for side in (golden, actual)
        )
        several = max(len(own), len(actual_side)) > 1
        foreign = any(side.system not in ("regress", "golden") for side in self.sides)
        if several and min(len(own), len(actual_side)) == 1 and foreign:
            self.planned.notes.append(
                f"step {self.step}: a dump of another system keeps what was written last, so it was compared with the "
                "last update"
            )
            return [(None, own[-1], actual_side[-1])]
        return [(number if several else None, number, number) for number in sorted({*own, *actual_side})]

    def _joined(self, matching: Matching, known: Sequence[Sample]) -> str:
        """Return words for samples without a counterpart that are known ones, one behind the other; empty for none."""
        for has, keys, side, records in zip(
            ("golden", "actual"),
            (matching.golden_only, matching.actual_only),
            self.sides,
            self.records,
            strict=True,
        ):
            found = [*joined_samples(side, records, keys, known)]
            if found:
                return joined_words(found, has)
        return ""

    def _tell(self, matching: Matching, joined: str) -> None:
        where = f"step {self.step}"
        self.planned.golden_only += [f"{where}, sample {named_as(key)}" for key in matching.golden_only]
        self.planned.actual_only += [f"{where}, sample {named_as(key)}" for key in matching.actual_only]
        self.planned.verdicts += unmatched(matching, Place(self.step), joined)
        if matching.by_content:
            self.planned.notes.append(
                f"{where}: {matching.by_content} samples were matched by their tokens, not by id"
            )
        if matching.by_place:
            self.planned.notes.append(
                f"{where}: {matching.by_place} rows were matched by rank, microbatch and row: one side does not tell "
                "their tokens"
            )
        for keys, said in (
            (matching.repeated, _REPEATED),
            (matching.ambiguous, _AMBIGUOUS),
        ):
            if keys:
                names = ", ".join(map(named_as, keys[:3])) + (" ..." if len(keys) > 3 else "")
                self.planned.notes.append(f"{where}: {len(keys)} samples {said.format(names)}")

    def _rollouts(self, golden: Sequence[Header], actual: Sequence[Header], matching: Matching) -> None:
        own, actual_side = (
            [r for r in side if r.key.record_type == "trajectory"] for side in (golden, actual)
        )
        if not own and not actual_side:
            return
        step = Place(self.step)
        if own and actual_side:
            unit = RolloutUnit(
                *self.paths,
                tuple(r.name for r in own),
                tuple(r.name for r in actual_side),
                step,
                dict(matching.golden_of),
                self.options.bounds,
                self.options.only,
            )
            self.planned.units.append(unit)
            return
        side, has = (self.sides[1], "golden") if own else (self.sides[0], "actual")
        if side.writes("trajectory"):
            if self.options.common:
                self.planned.notes.append(
                    f"step {self.step}: rollouts are in the {has} dump only, so they were not compared"
                )
            elif self.options.only.has(TRAJECTORY, TRAJECTORY):
                detail = f"rollouts were recorded in the {has} dump only: enable trajectory for both"
                self.planned.verdicts.append(one_sided(has, TRAJECTORY, TRAJECTORY, step, detail))
            return
        self.planned.notes.append(
            f"step {self.step}: only the {has} dump has rollouts ({side.folder} has none), so they were not compared"
        )


def limited(planned: Planned, options: Options, actual: Side) -> Planned:
    """Return the work on the chosen ranks and microbatches; absent ones become problems.

    A dump whose records belong to no rank or microbatch at all, as those of a client of a remote trainer, has none to
    choose from: all of it is compared.
    """
    places = [where for _, where in actual.entries.values()]
    for name, limit in (("rank", options.ranks), ("micro", options.micros)):
        if limit is None:
            continue
        word, plural = ("rank", "ranks") if name == "rank" else ("microbatch", "microbatches")
        there = {number for place in places if (number := getattr(place, name)) is not None}
        lacking = [str(number) for number in range(limit) if number not in there]
        if not there:
            planned.notes.append(f"{actual.folder} has no {plural}, so all of its records were compared")
        elif lacking:
            planned.problems.append(
                f"{word} {', '.join(lacking)} of {limit} asked for is not in the actual dump"
            )
        planned.units = [unit for unit in planned.units if _within(unit, name, limit)]
    return planned


def _within(unit: AnyUnit, name: str, limit: int) -> bool:
    """Return True if a unit is about the chosen ranks or microbatches, or about no single one of them."""
    if isinstance(unit, SingleUnit):
        return False
    return not isinstance(unit, Unit) or (getattr(unit.place, name) or 0) < limit
