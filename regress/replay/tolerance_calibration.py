"""Measured tolerances: distances between correct computations of a case.

For each precision and quantity the noise floor is the largest of: the response to weights perturbed by one unit in
the last place, over several seeds; the error of the precision against float64; an eighth of the spacing of the
dtype. The tolerance is ``kappa`` times that. Both layouts at the ends of the range are measured, the whole
mini-batch at once and one sample a microbatch, since a share of a loss has fewer terms there. Source of the rule:
TTrace, arXiv 2506.09280; that perturbation and dtype error are both needed was measured on this engine's models.

Errors are ``max |actual - golden|`` over the largest golden value of all microbatches. A Euclidean norm over
that of the same tensor is no better: over nine cases and ten held-out variants, healthy float32 tensors reach
at most 1.7 noise floors in the first measure, and 27 in the second, which has no scale where the tokens of a
microbatch are small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from regress.compare.quantities import quantity_named, source_of
from regress.compare.verdicts.tolerance import EXACT, Tolerance
from regress.compare.verdicts.verdict import Status, Verdict
from regress.engine.adapters.adapter_parameters import has_adapter
from regress.engine.numeric_types import DTYPES
from regress.engine.run_construction import Run
from regress.errors import ReplayError
from regress.golden.golden_case import GoldenCase
from regress.replay.case_run import replay
from regress.replay.case_truth import canonical
from regress.replay.job_spread import spread
from regress.replay.noise_floor import KAPPA, SEMANTICS, Floor, Response
from regress.replay.replay_judge import judge_replay
from regress.replay.run_changes import Prepare
from regress.replay.test_matrix import Replay
from regress.replay.variant import Precision
from regress.replay.variant_requirements import keeps_microbatches
from regress.replay.variant_table import BASE, VARIANTS

LAYOUTS = (BASE, VARIANTS["mbs1"])
SEEDS = 5

Responses = dict[str, dict[str, Response]]
"""``quantity -> tensor name -> measured response``."""


def calibrate(
    case: GoldenCase,
    workspace: Path,
    *,
    seeds: int = SEEDS,
    only: Collection[str] | None = None,
    advance: Callable[[], None] = lambda: None,
    processes: int = 1,
) -> list[Floor]:
    """Measure the noise floors of a recorded case.

    Args:
        only: quantities that are measured; None for all.
        advance: called after each replay.
        processes: number of processes that replay, which changes no value.

    Raises:
        ReplayError: if even float64 cannot be judged at its bound.
    """
    floors: list[Floor] = []
    precisions = precisions_of(case)
    exact = [precision for precision in precisions if precision is Precision.FLOAT64]
    for group in (exact, [precision for precision in precisions if precision not in exact]):
        jobs = [
            Job(case, precision, layout.variant.name, seeds, only)
            for precision in group
            for layout in layouts_of(case, precision)
        ]
        folder = workspace / "-".join(["measured", *group])
        measured = dict(zip(jobs, spread(measure, jobs, folder, advance, processes), strict=True))
        for precision in group:
            own = [found for job, found in measured.items() if job.precision is precision]
            floors += _floors(case, precision, own, seeds)
    return floors


@dataclass(frozen=True, eq=False)
class Job:
    """One layout of a case in one precision, to be replayed plainly and with each seed."""

    case: GoldenCase
    precision: Precision
    variant: str
    seeds: int
    only: Collection[str] | None


def precisions_of(case: GoldenCase) -> list[Precision]:
    """Return the precisions that tolerances are measured in: those that a case is replayed in."""
    return [precision for precision in KAPPA if not case.precisions or str(precision) in case.precisions]


def layouts_of(case: GoldenCase, precision: Precision) -> list[Replay]:
    """Return the layouts that a case is measured in: those of `LAYOUTS` that its values are true of."""
    found = (Replay(case, variant, precision) for variant in LAYOUTS)
    return [replay for replay in found if keeps_microbatches(replay)]


def replays_of(case: GoldenCase, seeds: int) -> int:
    """Return the number of replays that the calibration of a case takes."""
    return len(precisions_of(case)) * len(layouts_of(case, Precision.FLOAT64)) * (1 + seeds)


def _floors(
    case: GoldenCase, precision: Precision, found: Iterable[Responses], seeds: int
) -> Iterator[Floor]:
    """Yield the noise floors of a precision from the responses in each layout."""
    measured: Responses = {}
    for responses in found:
        for quantity, tensors in responses.items():
            joined = measured.setdefault(quantity, {})
            for name, row in tensors.items():
                joined[name] = joined.get(name, Response()).joined(row)
    if precision is Precision.FLOAT64:
        measured = {quantity: _without_error(tensors) for quantity, tensors in measured.items()}
        _refuse_blind_semantics(case, measured)
    for quantity, tensors in measured.items():
        yield Floor.of(quantity, precision, tensors, seeds)


def measure(job: Job, folder: Path, tick: Callable[[], None]) -> Responses:
    """Return the responses of a case in one layout and precision: to the dtype, and to each perturbation."""
    measured: Responses = {}
    case, precision, layout = job.case, job.precision, Replay(job.case, VARIANTS[job.variant], job.precision)

    def unbounded(quantity: str) -> Tolerance | None:
        return None if quantity in case.leaves_out else _unbounded(job.only, quantity)

    dump = replay(case, layout.variant, precision, folder / "plain")
    tick()
    own = canonical(case, dump, layout.plan)
    judged = partial(judge_replay, case, precision=precision, tolerance=unbounded, explained=False)
    _widen(measured, judged(dump, layout.plan), _dtype_error)
    for seed in range(job.seeds):
        prepare = perturbation(precision, seed)
        moved = replay(case, layout.variant, precision, folder / f"seed{seed}", prepare=prepare)
        tick()
        _widen(measured, judged(moved, layout.plan, truth=own.__getitem__), _perturbed)
    return measured


def _unbounded(only: Collection[str] | None, quantity: str) -> Tolerance | None:
    if only is not None and quantity not in only:
        return None
    return EXACT if quantity_named(quantity).exact else Tolerance(math.inf)


def _dtype_error(verdict: Verdict) -> Response:
    return Response(0.0, verdict.relative, verdict.max_error)


def _perturbed(verdict: Verdict) -> Response:
    return Response(verdict.relative, 0.0, verdict.max_error)


def _without_error(tensors: dict[str, Response]) -> dict[str, Response]:
    """Drop the dtype error: float64 has nothing more precise to compare with."""
    return {name: Response(row.perturbation, 0.0, row.absolute) for name, row in tensors.items()}


def _widen(measured: Responses, verdicts: Iterable[Verdict], response: Callable[[Verdict], Response]) -> None:
    """Take the largest error of each tensor that is compared by value."""
    for verdict in verdicts:
        if verdict.status not in (Status.OK, Status.DRIFT):
            raise ReplayError(f"""{verdict.quantity} {verdict.name} at {verdict.place} cannot be measured
            ({verdict.status}: {verdict.detail}); correct the case or the engine before calibrating""")
        if not quantity_named(verdict.quantity).exact:
            tensors = measured.setdefault(verdict.quantity, {})
            name = _golden_name(verdict)
            tensors[name] = tensors.get(name, Response()).joined(response(verdict))


def _golden_name(verdict: Verdict) -> str:
    """Return the name of a golden tensor, which other types repeat under names of their own."""
    record_type, _, tensor = verdict.name.partition("/")
    source = source_of(record_type, tensor)
    return verdict.name if source is None or source.primary else source.name


def _refuse_blind_semantics(case: GoldenCase, measured: Responses) -> None:
    """Refuse a case in which most tensors of a quantity are ill-conditioned; single ones may be."""
    limit = SEMANTICS / KAPPA[Precision.FLOAT64]
    for quantity, tensors in measured.items():
        largest = sorted(row.relative for row in tensors.values())
        if largest[len(largest) // 2] > limit:
            raise ReplayError(f"""case {case.name}: {quantity} moves by {largest[-1]:.1e} when float64 weights move by
            one ulp, so {SEMANTICS:g} cannot be asked of it; make the case better conditioned (a warm optimizer state,
            no tensor that is zero but for rounding)""")


def perturbation(precision: Precision, seed: int) -> Prepare:
    """Return a function that multiplies policy and reference weights by ``1 + s * eps``, ``s`` drawn from -1 and +1."""
    dtype = DTYPES[precision.dtype]
    eps = torch.finfo(dtype).eps

    @torch.no_grad()
    def move(run: Run) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in chain(_policy(run), _reference(run)):
            sign = torch.randint(0, 2, parameter.shape, generator=generator, dtype=torch.float64) * 2 - 1
            parameter.copy_(parameter.double() * (1 + sign * eps))

    return move


def _policy(run: Run) -> Iterable[Tensor]:
    """Return all weights, also those below an adapter, which are not trained."""
    policy = run.trainer.policy
    if has_adapter(policy.model):
        return policy.model.parameters()
    return (parameter for _, parameter in policy.named_parameters())


def _reference(run: Run) -> Iterable[Tensor]:
    reference = run.trainer.reference
    return () if reference is None else (value for _, value in reference.parameters())
