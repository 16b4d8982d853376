"""Comparison of two dumps, whatever system and layout wrote them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import TYPE_CHECKING, Any, TypeAlias

from regress.compare.dumps.adamw_settings import other_settings
from regress.compare.dumps.byte_verification import (
    NOT_VERIFIED,
    IntegrityUnit,
    Records,
    integrity_units,
    unsealed,
    verify_parts,
)
from regress.compare.dumps.comparison_options import AnyUnit, Options, Planned
from regress.compare.dumps.comparison_plan import limited, plan_units
from regress.compare.dumps.comparison_unit import Unit
from regress.compare.dumps.golden_source import GoldenSide
from regress.compare.dumps.loss_shares import ShareUnit, compare_shares
from regress.compare.dumps.opened_dump import Named, Side, close_sides, open_side, precisions
from regress.compare.dumps.rollout_comparison import RolloutUnit, compare_rollouts
from regress.compare.dumps.scaled_verdicts import (
    Finding,
    examined,
    notes_and_problems,
    rejudge_at_common_scale,
    without_carried,
)
from regress.compare.dumps.tensor_selection import Selection
from regress.compare.dumps.truth_source import TruthSide
from regress.compare.dumps.unit_comparison import compare_unit
from regress.compare.dumps.weight_drift import spread, weight_distances
from regress.compare.quantities import QUANTITIES, source_or_other
from regress.compare.single_dump_units import SingleUnit, check_single
from regress.compare.verdicts.verdict import Status, Verdict
from regress.compare.verdicts.verdict_sequence import Verdicts, in_order
from regress.dump.coordinates import Place
from regress.dump.source_readers import spans_of
from regress.errors import CompareError

if TYPE_CHECKING:
    import pandas as pd

_OF_LOGITS = frozenset(("log_probs", "entropy"))
_SHOWN = 8
"""Most tensors that a notebook shows."""
Scales: TypeAlias = Mapping[tuple[str, str], float]
Job: TypeAlias = tuple[AnyUnit, Scales | None]
Engine: TypeAlias = Callable[[Sequence[Job]], Iterable[list[Finding]]]
"""Function that runs jobs anywhere and in any order, and yields their results in the order of the jobs."""


@dataclass(frozen=True)
class Comparison:
    """Result of comparing two dumps.

    Attributes:
        verdicts: in the order of computation.
        golden_only, actual_only: samples without a counterpart, in words.
        notes: unknown facts and omissions, a sentence each.
        problems: parts that could not be compared, a sentence each.
        group_sizes: numbers of samples of a group in an update.
    """

    golden: str
    actual: str
    verdicts: list[Verdict] = field(default_factory=list)
    golden_only: list[str] = field(default_factory=list)
    actual_only: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    group_sizes: tuple[int, ...] = ()

    @property
    def failed(self) -> list[Verdict]:
        """The verdicts that are not ok, in the order of computation."""
        return [verdict for verdict in self.verdicts if not verdict.ok]

    @property
    def compared(self) -> int:
        """Elements of tensors that were compared."""
        alone = ("coverage", "replicas", "invariants")
        return sum(verdict.count for verdict in self.verdicts if verdict.quantity not in alone)

    @property
    def exit_code(self) -> int:
        """Exit code: 0 equal within tolerance, 1 different, 2 if something, or everything, could not be compared."""
        if self.failed:
            return 1
        return 2 if self.problems or not self.compared else 0

    def to_pandas(self) -> pd.DataFrame:
        """Return a DataFrame with a row for each verdict, in the order of computation, as `Verdicts.to_frame` does."""
        return Verdicts(self.verdicts).to_frame()

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the result in a line, and the first tensors that differ."""
        word = {
            0: "equal within tolerance",
            1: f"{len(self.failed)} of {len(self.verdicts)} verdicts are not ok",
        }
        line = escape(
            f"{self.golden} and {self.actual}: {word.get(self.exit_code, 'not all could be compared')}"
        )
        shown = ["status", "quantity", "name", "step", "rank", "micro", "multiple", "worst_where", "detail"]
        frame = Verdicts(self.failed[:_SHOWN]).to_frame()[shown]
        lines = [f"<p>{escape(text)}</p>" for text in self.problems[:_SHOWN]]
        return "".join([f"<p>{line}</p>", frame.to_html(index=False) if len(frame) else "", *lines])

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict of strict JSON values, but for the numbers of verdicts, which may be infinite."""
        return {
            "golden": self.golden,
            "actual": self.actual,
            "exit_code": self.exit_code,
            "compared": self.compared,
            "unmatched": {"golden": self.golden_only, "actual": self.actual_only},
            "notes": self.notes,
            "problems": self.problems,
            "verdicts": [verdict.to_json() for verdict in self.verdicts],
        }


def compare_dumps(
    golden: str,
    actual: str,
    options: Options | None = None,
    *,
    engine: Engine | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> Comparison:
    """Compare two dumps.

    Args:
        golden, actual: folders or URLs of dumps of any system that is known.
        engine: does the work; by default this process, one unit after the other.
        advance: called with the number of all units (negative) first, then with the numbers of those done.

    Raises:
        DumpError: if a dump is missing, incomplete or damaged.
        CompareError: if nothing can be compared.
    """
    asked = options or Options()
    close_sides()  # the dumps may have changed since
    golden_side = open_side(golden)
    if isinstance(golden_side, GoldenSide) and asked.bounds.case == "":
        asked = replace(asked, bounds=asked.bounds.over(golden_side.case))
    planned = limited(plan_units(golden, actual, asked), asked, open_side(actual))
    sides = golden_side, open_side(actual)
    planned.notes += unsealed(sides) if asked.verify else [NOT_VERIFIED]
    checks = _checks(golden, actual, planned, asked) if asked.verify else []
    work_of: list[AnyUnit] = [*checks, *planned.units]
    advance(-len(work_of))
    run = engine or serial
    results = list(_done(work_of, run([(unit, None) for unit in work_of]), advance))[len(checks) :]
    results = _without_common(results, planned)
    results = _given_the_weights(results, run, sides, planned.notes)
    notes, problems = notes_and_problems(results)
    planned.notes += notes
    planned.problems += problems
    results = [(unit, [finding for finding in findings if not finding.problem]) for unit, findings in results]
    verdicts = without_carried(
        rejudge_at_common_scale(results, run, planned.problems), results, planned.problems
    )
    failed = {verdict.quantity for verdict in verdicts if not verdict.ok}
    planned.notes += unknown(golden_side, open_side(actual), failed)
    planned.notes += other_settings(golden_side, open_side(actual)) if failed & {"optimizer", "param"} else ()
    comparison = Comparison(
        golden,
        actual,
        in_order(examined([*planned.verdicts, *verdicts], results, run)),
        planned.golden_only,
        planned.actual_only,
        planned.notes,
        planned.problems,
        _group_sizes(planned.units),
    )
    if not comparison.compared and not comparison.failed:
        raise _nothing_compared(comparison, asked, golden_side)
    if asked.verify:
        _verify(unit for unit, findings in results if any(not finding.verdict.ok for finding in findings))
    return comparison


def exchanged(comparison: Comparison, first: Verdict, options: Options) -> list[Verdict]:
    """Compare the quantity of a verdict in its step again, with the golden and the actual dump exchanged.

    Args:
        options: those of the comparison.

    Returns:
        Nothing where one side is right by definition: a golden case, or values that were computed as truth.
    """
    golden, step = open_side(comparison.golden), first.place.step
    if isinstance(golden, GoldenSide | TruthSide) or first.status not in (Status.DRIFT, Status.MASK):
        return []
    only = Selection.of(first.quantity)
    steps = None if step is None else (step, step)
    asked = replace(options, steps=steps, ranks=None, micros=None, only=only, verify=False)
    try:
        return compare_dumps(comparison.actual, comparison.golden, asked).verdicts
    except CompareError:  # nothing is left to compare
        return []


def _nothing_compared(comparison: Comparison, asked: Options, golden: Side) -> CompareError:
    why = f" ({comparison.problems[0]})" if comparison.problems else ""
    only = f": nothing matches {asked.only.words}" if asked.only.patterns else ""
    near = asked.only.meant(_names(golden)) if asked.only.patterns else ""
    return CompareError(
        f"not one element of {comparison.golden} and {comparison.actual} was compared{only}{near}{why}"
    )


def _names(side: Side) -> Iterator[str]:
    """Yield the names that tensors are asked for by: quantities, and the tensors of the first step."""
    yield from (quantity.name for quantity in QUANTITIES)
    first = min((where.step for _, where in side.entries.values()), default=0)
    for name, (record_type, where) in side.entries.items():
        if where.step == first:
            yield from (source_or_other(record_type, tensor).label for tensor in side.read(name).tensors)


def _checks(golden: str, actual: str, planned: Planned, options: Options) -> list[IntegrityUnit]:
    """Return the verification of what is read, or, where no part of it was chosen, of all records of the steps."""
    every = [Records.of(open_side(golden), open_side(actual), options.has)] if options.everywhere else []
    return integrity_units(golden, actual, [*every, *planned.units], options.only)


def _without_common(
    results: list[tuple[AnyUnit, list[Finding]]], planned: Planned
) -> list[tuple[AnyUnit, list[Finding]]]:
    """Drop defects that the golden side has, too: the dumps do not differ in them, so each becomes a note."""
    found = []
    for unit, findings in results:
        failed = [finding.verdict for finding in findings if not finding.verdict.ok]
        if isinstance(unit, SingleUnit) and failed:
            golden = {v.name: v for f in check_single(unit.of_golden) if not (v := f.verdict).ok}
            for verdict in (verdict for verdict in failed if verdict.name in golden):
                planned.notes.append(
                    f"{verdict.place}: {verdict.quantity} {verdict.name} is broken in both dumps: {verdict.detail}"
                )
            findings = [f for f in findings if f.verdict.ok or f.verdict.name not in golden]
        found.append((unit, findings))
    return found


def _given_the_weights(
    results: list[tuple[AnyUnit, list[Finding]]], run: Engine, sides: tuple[Side, Side], notes: list[str]
) -> list[tuple[AnyUnit, list[Finding]]]:
    """Compare anew what fails in later updates, under tolerances for weights that differ as rounding made them."""
    failing = {number: at for number, (unit, found) in enumerate(results) if (at := _failed_at(unit, found))}
    if not failing or isinstance(sides[0], GoldenSide | TruthSide):
        return results
    bounds = next(unit.bounds for unit, _ in results if isinstance(unit, Unit | ShareUnit))
    dtypes = precisions(sides) or ["float32"]

    def relative(moved: float) -> dict[str, float]:
        grown = replace(bounds, moved=moved)
        return {name: grown.of(name, dtypes).relative for name in ("gradient", "optimizer")}

    apart = {at: own for at, own in weight_distances(sides, relative).items() if own.relative}
    shifts = _shifts(results)
    wider = {
        number: replace(unit, bounds=replace(unit.bounds, moved=apart[at].relative, shifted=shifts.get(at)))
        for number, at in failing.items()
        if at in apart and isinstance(unit := results[number][0], Unit | ShareUnit)
    }
    again = run([(unit, None) for unit in wider.values()])
    found = list(results)
    for (number, unit), findings in zip(wider.items(), again, strict=True):
        found[number] = unit, findings
    notes += spread({failing[number]: apart[failing[number]] for number in wider})
    return found


def _shifts(results: Iterable[tuple[AnyUnit, list[Finding]]]) -> dict[Place, float]:
    """Return the largest difference of log-probs and entropies of each update."""
    found: dict[Place, float] = {}
    for verdict in (finding.verdict for _, findings in results for finding in findings):
        if verdict.quantity in _OF_LOGITS:
            at = verdict.place.of_update.counted
            found[at] = max(found.get(at, 0.0), verdict.max_error)
    return found


def _failed_at(unit: AnyUnit, findings: Sequence[Finding]) -> Place | None:
    """Return step and update of a unit of which something drifts beyond a tolerance of the table; else None."""
    table = (f for f in findings if f.verdict.status is Status.DRIFT and "dtype" in f.tolerance.basis)
    failed = next(table, None)
    if failed is None or not isinstance(unit, Unit | ShareUnit):
        return None
    return failed.verdict.place.of_update.counted


def _group_sizes(units: Iterable[AnyUnit]) -> tuple[int, ...]:
    samples = {
        (unit.place.step, unit.place.update, *key)
        for unit in units
        if isinstance(unit, Unit)
        for key in unit.frame.samples
    }
    groups = Counter((step, update, group) for step, update, group, _ in samples)
    return tuple(sorted(set(groups.values())))


def _verify(differing: Iterable[AnyUnit]) -> None:
    """Read the files that differ again, as far as their bytes were not verified before."""
    files: dict[tuple[Named, str], None] = {}
    for unit in differing:
        files |= dict.fromkeys((unit.golden, name) for name in unit.golden_names)
        files |= dict.fromkeys((unit.actual, name) for name in unit.actual_names)
    for path, name in files:
        side = open_side(path)
        if not spans_of(side, name):
            side.verify(name)


def serial(jobs: Sequence[Job]) -> Iterator[list[Finding]]:
    """Run all jobs in this process."""
    return map(work, jobs)


def work(job: Job) -> list[Finding]:
    """Run one job; a module-level function, so that it can be pickled."""
    unit, scales = job
    if isinstance(unit, IntegrityUnit):
        verify_parts(unit)
        return []
    if isinstance(unit, ShareUnit):
        return compare_shares(unit)
    if isinstance(unit, RolloutUnit):
        return compare_rollouts(unit)
    if isinstance(unit, SingleUnit):
        return check_single(unit)
    return compare_unit(unit, scales)


def _done(
    units: Sequence[AnyUnit], results: Iterable[list[Finding]], advance: Callable[[int], None]
) -> Iterator[tuple[AnyUnit, list[Finding]]]:
    for unit, found in zip(units, results, strict=True):
        advance(1)
        yield unit, found


def unknown(golden: Side, actual: Side, failed: Collection[str]) -> Iterator[str]:
    """Yield a sentence for each missing fact that would tell more about the failures.

    Args:
        failed: quantities of which something is wrong.
    """
    if not failed:
        return
    if not golden.config and not actual.config:
        yield (
            "no configuration is known: causes that depend on coefficients, clip ranges or optimizer settings cannot "
            "be named, and invariants of the objective were not asked"
        )
    ranks = {place.rank for _, place in actual.entries.values() if place.rank is not None}
    if len(ranks) > 1 and not actual.mesh:
        yield (
            "the mesh of the actual ranks is unknown: patterns along its dimensions cannot be named, and a rank that "
            "is missing is not noticed"
        )
    if not _OF_LOGITS.isdisjoint(failed) and not _has_logits(golden):
        yield "the golden side has no logits: neither a temperature nor shifted targets can be named"


def _has_logits(side: Side) -> bool:
    names = (name for name, (type, _) in side.entries.items() if type == "activations")
    return any(tensor.endswith("lm_head") for name in names for tensor in side.read(name).tensors)
