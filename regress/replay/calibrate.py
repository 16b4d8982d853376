"""Measured tolerances: how far correct computations of a case lie apart.

For each precision and quantity the noise floor is the largest of: the response to weights perturbed by one unit in
the last place, over several seeds; the error of the precision against float64; an eighth of the spacing of the
dtype. The tolerance is ``kappa`` times that. Both layouts at the ends of the range are measured, the whole
mini-batch at once and one sample a microbatch, since a share of a loss has fewer terms there. Source of the rule:
TTrace, arXiv 2506.09280; that perturbation and dtype error are both needed was measured on this engine's models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from regress.compare.quantities import quantity_named
from regress.compare.tolerance import EXACT, Tolerance
from regress.compare.verdict import Status, Verdict
from regress.engine.build import Run
from regress.engine.precision import DTYPES
from regress.errors import ReplayError
from regress.golden.case import GoldenCase
from regress.golden.tolerance import ToleranceEntry
from regress.replay.judge import NATIVE, judge_replay
from regress.replay.matrix import Replay
from regress.replay.run import Prepare, replay
from regress.replay.truth import canonical
from regress.replay.variants import BASE, VARIANTS, Precision

KAPPA: Mapping[Precision, float] = {Precision.FLOAT64: 4.0, Precision.FLOAT32: 4.0, Precision.BFLOAT16: 3.0}
"""Multiple of the floor. Held-out measurement: no healthy float32 run exceeded 3.0, no bfloat16 run 2.2."""

SEMANTICS = 1e-12
"""Bound in float64: correct layouts agree to 1e-14, the smallest real bugs are at 1e-2."""

BLIND = 1.0
"""A tolerance of this size passes a tensor of zeros, so nothing could fail."""

LAYOUTS = (BASE, VARIANTS["mbs1"])
SEEDS = 5


@dataclass(frozen=True)
class Floor:
    """What was measured of one quantity in one precision, relative to the scale of its tensors."""

    quantity: str
    precision: Precision
    perturbation: float
    dtype_error: float
    seeds: int

    @property
    def floor(self) -> float:
        """The largest of both and an eighth of the dtype's spacing."""
        return max(self.perturbation, self.dtype_error, _eps(self.quantity, self.precision) / 8)

    @property
    def tolerance(self) -> float | None:
        """The bound, or None where it could not fail."""
        if self.precision is Precision.FLOAT64:
            return SEMANTICS
        bound = KAPPA[self.precision] * self.floor
        return bound if bound < BLIND else None

    @property
    def entry(self) -> ToleranceEntry:
        """What the manifest keeps."""
        basis = {
            "perturbation": self.perturbation,
            "dtype_error": self.dtype_error,
            "seeds": self.seeds,
            "kappa": KAPPA[self.precision],
        }
        return ToleranceEntry(self.tolerance, 0.0, basis, self._reason(KAPPA[self.precision]))

    def _reason(self, kappa: float) -> str:
        if self.precision is Precision.FLOAT64:
            return (
                f"true float64: correct layouts differ by rounding only (floor {self.floor:.1e} here), "
                f"errors of the mathematics are above 1e-2; the bound is {SEMANTICS:g}"
            )
        if self.tolerance is None:
            return f"{kappa:g} times the noise floor of {self.floor:.1e} would pass a tensor of zeros: not judged"
        return f"{kappa:g} times the noise floor of {self.floor:.1e} ({self._largest})"

    @property
    def _largest(self) -> str:
        """Which of the three is the noise floor."""
        if max(self.perturbation, self.dtype_error) < self.floor:
            return "an eighth of the dtype's spacing"
        return (
            "weights moved by one ulp" if self.perturbation >= self.dtype_error else "error against float64"
        )


def calibrate(
    case: GoldenCase,
    workspace: Path,
    *,
    seeds: int = SEEDS,
    advance: Callable[[], None] = lambda: None,
) -> list[Floor]:
    """Measure the noise floors of a recorded case; ``advance`` is called after each replay.

    Raises:
        ReplayError: if even float64 cannot be judged at its bound.
    """
    return [floor for precision in KAPPA for floor in _floors(case, precision, workspace, seeds, advance)]


def replays_of(seeds: int) -> int:
    """How many replays a calibration takes."""
    return len(KAPPA) * len(LAYOUTS) * (1 + seeds)


def _floors(
    case: GoldenCase, precision: Precision, workspace: Path, seeds: int, advance: Callable[[], None]
) -> list[Floor]:
    errors: dict[str, float] = {}
    responses: dict[str, float] = {}
    for variant in LAYOUTS:
        layout = Replay(case, variant, precision)
        folder = workspace / f"{variant.name}{precision.suffix}"
        dump = replay(case, variant, precision, folder / "plain")
        advance()
        own = canonical(case, dump, layout)
        _widen(errors, judge_replay(case, dump, layout.plan, precision, tolerance=_unbounded))
        for seed in range(seeds):
            moved = replay(
                case, variant, precision, folder / f"seed{seed}", prepare=perturbation(precision, seed)
            )
            advance()
            verdicts = judge_replay(
                case, moved, layout.plan, precision, truth=own.__getitem__, tolerance=_unbounded
            )
            _widen(responses, verdicts)
    floors = [
        Floor(
            quantity, precision, responses[quantity], 0.0 if precision is Precision.FLOAT64 else error, seeds
        )
        for quantity, error in errors.items()
    ]
    _refuse_blind_semantics(case, floors)
    return floors


def _unbounded(quantity: str) -> Tolerance:
    return EXACT if quantity_named(quantity).exact else Tolerance(math.inf)


def _widen(largest: dict[str, float], verdicts: Iterable[Verdict]) -> None:
    """Take the largest relative error of each quantity that is compared by value."""
    for verdict in verdicts:
        if verdict.status not in (Status.OK, Status.DRIFT):
            raise ReplayError(
                f"{verdict.quantity} {verdict.name} at {verdict.place} cannot be measured ({verdict.status}: "
                f"{verdict.detail}); correct the case or the engine before calibrating"
            )
        if not quantity_named(verdict.quantity).exact:
            largest[verdict.quantity] = max(largest.get(verdict.quantity, 0.0), verdict.relative)


def _refuse_blind_semantics(case: GoldenCase, floors: Iterable[Floor]) -> None:
    for floor in floors:
        if floor.precision is Precision.FLOAT64 and KAPPA[floor.precision] * floor.floor > SEMANTICS:
            raise ReplayError(
                f"case {case.name}: {floor.quantity} moves by {floor.floor:.1e} when float64 weights move by one ulp, "
                f"so {SEMANTICS:g} cannot be asked of it; make the case better conditioned (a warm optimizer state, "
                "no tensor that is zero but for rounding)"
            )


def perturbation(precision: Precision, seed: int) -> Prepare:
    """Every weight times ``1 + s * eps`` of the dtype, ``s`` drawn from -1 and +1."""
    dtype = DTYPES[precision.dtype]
    eps = torch.finfo(dtype).eps

    @torch.no_grad()
    def move(run: Run) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _, parameter in run.trainer.policy.named_parameters():
            sign = torch.randint(0, 2, parameter.shape, generator=generator, dtype=torch.float64) * 2 - 1
            parameter.copy_(parameter.double() * (1 + sign * eps))

    return move


def _eps(quantity: str, precision: Precision) -> float:
    """Spacing of the dtype that a quantity is computed in."""
    lowered = quantity in NATIVE or precision is Precision.FLOAT64
    return float(torch.finfo(DTYPES[precision.dtype] if lowered else torch.float32).eps)
