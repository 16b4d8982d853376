"""Validation of a case's tolerances on other seeds of it, with held-out variants and faults.

Each seed makes the case anew by its recipe: other weights, another warm optimizer state, other rollouts.
It is recorded and calibrated as the case itself would be; then every healthy variant must pass, and every fault that
changes anything beyond rounding must fail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from regress.errors import ConfigError, GoldenError
from regress.golden.golden_case import GoldenCase
from regress.golden.golden_directory import GoldenStore
from regress.golden.golden_files import CASE_FILE
from regress.replay.case_recording import record
from regress.replay.noise_floor import KAPPA
from regress.replay.probes import Probe, probes
from regress.replay.temporary_workspace import Workspace
from regress.replay.tolerance_calibration import calibrate, replays_of
from regress.replay.tolerance_proof import bounds_of
from regress.replay.validation_run import HELD_OUT, ValidationRun, run_validation
from regress.replay.variant import Precision
from regress.report.calibration_report import Faulty, Healthy
from regress.report.number_format import plural

SEEDS = 3


@dataclass(frozen=True)
class Exposure:
    """A fault under one seed, in float32.

    Attributes:
        exercised: True if it changes any tensor by more than its noise floor, in exact arithmetic.
    """

    run: ValidationRun
    exercised: bool

    @property
    def missed(self) -> bool:
        """True if the fault changes something and yet nothing fails."""
        return self.exercised and self.run.first is None and self.run.problem is None


@dataclass(frozen=True)
class ValidatedSeed:
    """One seed: the runs of healthy variants in all precisions, and of faults."""

    seed: int
    healthy: Sequence[ValidationRun]
    faults: Sequence[Exposure]


@dataclass(frozen=True)
class Validation:
    """Results of all seeds of a case."""

    case: str
    seeds: Sequence[ValidatedSeed]

    @property
    def alarms(self) -> list[str]:
        """A sentence for each healthy replay that fails or cannot be run."""
        return [
            f"seed {one.seed}, {run.name} in {run.precision}: "
            + (run.problem or f"{run.worst}, {run.multiple:.3g} x tolerance")
            for one in self.seeds
            for run in one.healthy
            if run.problem is not None or run.first is not None
        ]

    @property
    def misses(self) -> list[str]:
        """A sentence for each fault that changes something and passes."""
        return [
            f"seed {one.seed}, {found.run.name}: {found.run.multiple:.3g} x tolerance, {found.run.worst}"
            for one in self.seeds
            for found in one.faults
            if found.missed
        ]

    @property
    def summary(self) -> str:
        """Summary in one line: `dense, 10 seeds: 100 healthy replays in each precision, 0 false alarms; ...`."""
        runs = len(self.seeds) * len(HELD_OUT)
        hit = [row for row in self.faulty if row.exercised]
        line = f"{self.case}, {plural(len(self.seeds), 'seed')}: {plural(runs, 'healthy replay')} in each precision, "
        line += plural(len(self.alarms), "false alarm")
        if any(one.faults for one in self.seeds):
            line += f"; {plural(len(hit), 'fault')} that change anything, {len(self.misses)} missed"
        return line

    @property
    def healthy(self) -> list[Healthy]:
        """Every quantity of every healthy replay."""
        return [
            Healthy(one.seed, run.name, str(run.precision), quantity, multiple)
            for one in self.seeds
            for run in one.healthy
            for quantity, multiple in run.multiples.items()
        ]

    @property
    def faulty(self) -> list[Faulty]:
        """Every fault under every seed where it could be run."""
        return [
            Faulty(
                one.seed,
                row.run.name,
                row.exercised,
                row.run.first is not None,
                row.run.multiple,
                row.run.worst,
            )
            for one in self.seeds
            for row in one.faults
            if row.run.problem is None
        ]


def small_faults() -> list[Probe]:
    """Return the faults that are tried under each seed."""
    return [fault for fault in probes().values() if fault.small]


def replays_of_seed(case: GoldenCase, faults: bool) -> int:
    """Return the number of replays that a seed takes, besides those that make its inputs."""
    return replays_of(case, SEEDS) + len(KAPPA) * len(HELD_OUT) + (2 * len(small_faults()) if faults else 0)


def validate(
    case: GoldenCase, seeds: int, *, faults: bool = True, advance: Callable[[], None] = lambda: None
) -> Validation:
    """Make, calibrate and validate a case under this many other seeds.

    Raises:
        ConfigError: if it has no recipe from which inputs of other seeds are made.
    """
    if case.precisions:
        raise GoldenError(f"""case {case.name} is replayed in {", ".join(case.precisions)} only, so other seeds of it
        show little; validate a case without precisions in its case.yaml""")
    if not case.recipe:
        raise ConfigError(
            f"{case.folder} has no recipe in case.yaml, so it has no other seeds; say how its inputs are made"
        )
    first = int(str(case.config.get("seed", 0))) + 1
    found = []
    for seed in range(first, first + seeds):
        with Workspace() as folder:
            other = _with_seed(case, seed, folder / "golden")
            found.append(_tried(other, seed, folder, faults, advance))
    return Validation(case.name, found)


def _with_seed(case: GoldenCase, seed: int, root: Path) -> GoldenCase:
    """Return the case with another seed, recorded even if some faults could not show in it (the runs tell)."""
    tree: dict[str, Any] = yaml.safe_load((case.folder / CASE_FILE).read_text())
    tree["config"]["seed"] = seed
    folder = root / case.name
    folder.mkdir(parents=True)
    (folder / CASE_FILE).write_text(yaml.safe_dump(tree))
    store = GoldenStore(root)
    record(store, case.name, signal=False)
    return store.case(case.name)


def _tried(
    case: GoldenCase, seed: int, workspace: Path, faults: bool, advance: Callable[[], None]
) -> ValidatedSeed:
    floors = calibrate(case, workspace / "calibrate", seeds=SEEDS, advance=advance)
    healthy = []
    for precision in KAPPA:
        bounds = bounds_of(case, floors, precision)
        for variant in HELD_OUT:
            healthy.append(run_validation(case, variant, precision, workspace / "run", bounds))
            advance()
    exposures = []
    float32 = bounds_of(case, floors, Precision.FLOAT32)
    rounding = bounds_of(case, floors, Precision.FLOAT32, 1 / KAPPA[Precision.FLOAT32])
    for fault in small_faults() if faults else ():
        exact = run_validation(case, fault.variant, Precision.FLOAT64, workspace / "run", rounding, fault)
        advance()
        run = run_validation(case, fault.variant, Precision.FLOAT32, workspace / "run", float32, fault)
        advance()
        exposures.append(Exposure(replace(run, name=fault.name), exact.first is not None))
    return ValidatedSeed(seed, healthy, exposures)


def to_json(found: Validation) -> Mapping[str, Any]:
    """Return a plain tree; runs keep their largest multiple of each quantity."""
    return {
        "schema_version": 1,
        "case": found.case,
        "false_alarms": found.alarms,
        "missed": found.misses,
        "draws": [
            {
                "seed": one.seed,
                "healthy": [_row(run) for run in one.healthy],
                "faults": [_row(row.run) | {"exercised": row.exercised} for row in one.faults],
            }
            for one in found.seeds
        ],
    }


def _row(run: ValidationRun) -> dict[str, Any]:
    multiples = {
        quantity: value if value < float("inf") else None for quantity, value in run.multiples.items()
    }
    row = {"name": run.name, "precision": str(run.precision), "first": run.first, "worst": run.worst}
    return {**row, "problem": run.problem, "multiples": multiples}
