"""Proof of tolerances on their own case: healthy variants that must pass, and faults that must not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from regress.compare.verdicts.tolerance import EXACT, Tolerance, Tolerances
from regress.golden.golden_case import GoldenCase
from regress.replay.job_spread import spread
from regress.replay.noise_floor import Floor
from regress.replay.probes import Probe, probe_named, probes
from regress.replay.tolerance_calibration import precisions_of
from regress.replay.validation_run import HELD_OUT, ValidationRun, run_validation
from regress.replay.variant import Precision
from regress.report.calibration_report import CalibrationRow
from regress.report.number_format import multiple


@dataclass(frozen=True)
class Proof:
    """Runs in every precision.

    Attributes:
        healthy: runs of the held-out variants.
        faulty: runs of the corpus of faults.
    """

    healthy: Sequence[ValidationRun]
    faulty: Sequence[ValidationRun]

    def begins(self, fault: str) -> str | None:
        """Return the quantity that a fault breaks first, in exact arithmetic; None where it changes nothing here."""
        found = (t.first for t in self.faulty if (t.name, t.precision) == (fault, Precision.FLOAT64))
        return next(found, None)

    def smallest(self, quantity: str, precision: Precision) -> ValidationRun | None:
        """Return the fault that begins in a quantity and is the smallest there."""
        found = [
            run
            for run in self.faulty
            if run.precision is precision and run.problem is None and self.begins(run.name) == quantity
        ]
        return min(found, key=lambda run: run.multiples.get(quantity, 0.0), default=None)

    def widest(self, quantity: str, precision: Precision) -> ValidationRun | None:
        """Return the healthy variant that comes closest to failing in a quantity."""
        found = [t for t in self.healthy if t.precision is precision and quantity in t.multiples]
        return max(found, key=lambda run: run.multiples[quantity], default=None)

    @property
    def alarms(self) -> list[str]:
        """A sentence for each healthy variant that fails: check the engine, or use more seeds."""
        failing = [run for run in self.healthy if run.first is not None]
        return [
            f"{run.name} in {run.precision} is healthy, but fails: {run.worst}, {multiple(run.multiple)}"
            for run in failing
        ]


def tried_faults() -> list[Probe]:
    """Return the faults that calibration tries."""
    return [*probes().values()]


def run_count(case: GoldenCase) -> int:
    """Return the number of replays that a proof of a case takes."""
    return len(precisions_of(case)) * (len(HELD_OUT) + len(tried_faults()))


def prove(
    case: GoldenCase,
    floors: Sequence[Floor],
    workspace: Path,
    advance: Callable[[], None] = lambda: None,
    processes: int = 1,
) -> Proof:
    """Replay the held-out variants and the corpus of faults, judged by the measured tolerances.

    A fault counts in the quantity that it breaks first in the first, exact precision: in the others that quantity alone
    is judged, and a fault that breaks nothing exactly, or no quantity that has a tolerance, is not tried.

    Args:
        processes: number of processes that replay, which changes no value.
    """
    precisions, faults = precisions_of(case), tried_faults()
    begins: dict[str, str | None] = dict.fromkeys((fault.words for fault in faults), None)
    runs: list[ValidationRun] = []
    for group in (precisions[:1], precisions[1:]):
        tried = [fault for fault in faults if fault.words in begins]
        for _ in range(len(group) * (len(faults) - len(tried))):
            advance()
        jobs = [
            Trial(case, precision, name, None if fault is None else fault.name, tuple(floors), only)
            for precision in group
            for name, fault, only in (
                *((variant, None, None) for variant in HELD_OUT),
                *((fault.variant, fault, begins[fault.words]) for fault in tried),
            )
        ]
        folder = workspace / "-".join(["proof", *group])
        runs += spread(try_out, jobs, folder, advance, processes)
        if group == [Precision.FLOAT64]:
            measured = {floor.quantity for floor in floors}
            begins = {run.name: run.first for run in runs if run.name in begins and run.first in measured}
    words = {fault.words for fault in faults}
    return Proof([run for run in runs if run.name not in words], [run for run in runs if run.name in words])


@dataclass(frozen=True)
class Trial:
    """A healthy variant, or a fault under its variant, in one precision.

    Attributes:
        only: the quantity that is judged; None for all.
    """

    case: GoldenCase
    precision: Precision
    variant: str
    fault: str | None
    floors: Sequence[Floor]
    only: str | None = None


def try_out(trial: Trial, folder: Path, tick: Callable[[], None]) -> ValidationRun:
    """Replay a trial and judge it by the measured tolerances."""
    fault = None if trial.fault is None else probe_named(trial.fault)
    known = bounds_of(trial.case, trial.floors, trial.precision)
    bounds = (
        known if trial.only is None else lambda quantity: known(quantity) if quantity == trial.only else None
    )
    found = run_validation(trial.case, trial.variant, trial.precision, folder / "trial", bounds, fault)
    tick()
    return found


def bounds_of(
    case: GoldenCase, floors: Iterable[Floor], precision: Precision, factor: float = 1.0
) -> Tolerances:
    """Return the measured tolerance of each quantity, times a factor; None for one that the case leaves out."""
    known = {f.quantity: f.tolerance.scaled(factor) for f in floors if f.precision is precision}

    def of(quantity: str) -> Tolerance | None:
        return None if quantity in case.leaves_out else known.get(quantity, EXACT)

    return of


def rows_of(floors: Iterable[Floor], proof: Proof | None) -> list[CalibrationRow]:
    """Return the rows of a calibration table: one for each quantity and precision."""
    return [_row(floor, proof) for floor in floors]


def _row(floor: Floor, proof: Proof | None) -> CalibrationRow:
    widest = proof and proof.widest(floor.quantity, floor.precision)
    smallest = proof and proof.smallest(floor.quantity, floor.precision)
    entry = floor.entry
    return CalibrationRow(
        quantity=floor.quantity,
        precision=str(floor.precision),
        floor=None if floor.shared is None else floor.floor,
        source=floor.source,
        tolerance=entry.relative or None,
        ill={pattern: own.absolute for pattern, own in entry.tensors.items()}
        or ({} if entry.relative else {"*": entry.absolute}),
        spread=widest.relative[floor.quantity] if widest else None,
        closest=widest.multiples[floor.quantity] if widest else None,
        variant=widest.name if widest else None,
        fault=smallest.name if smallest else None,
        multiple=smallest.multiples.get(floor.quantity, 0.0) if smallest else None,
    )
