"""Judgement of a replay through a training service: by the truth, and by the engine's step on what was sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from regress.compare.diagnosis.run_context import RunContext
from regress.compare.dumps.comparison import Comparison, compare_dumps
from regress.compare.dumps.comparison_options import Options
from regress.compare.dumps.tolerance_bounds import Bounds
from regress.compare.verdicts.tolerance import BITWISE, Tolerance
from regress.compare.verdicts.tolerance_overrides import Overrides
from regress.compare.verdicts.verdict import Verdict
from regress.dump.coordinates import Place
from regress.errors import CompareError
from regress.golden.golden_case import GoldenCase
from regress.replay.replay_context import commands
from regress.replay.test_matrix import Replay
from regress.replay.variant import Precision
from regress.report.comparison_report import run_context_of
from regress.service.replay.remote_replay import RemoteReplay
from regress.service.replay.remote_variants import quantities

MASKS = ("response_mask", "effective_valid")
"""Tensors of the inputs that Weaver's losses of ratios alone have: elsewhere a weight of 0 leaves a token out."""
SEMANTICS = Tolerance(
    1e-12, reason="float64: a service and the engine's step on the same datums differ by rounding only"
)


def compare_with_truth(
    case: GoldenCase, found: RemoteReplay, *, scale: float = 1.0, overrides: Overrides | None = None
) -> Comparison:
    """Compare what a float32 service computed with the truth of a case, within measured tolerances.

    Args:
        scale: factor on the tolerances.
        overrides: tolerances that the project sets by hand.
    """
    bounds = replace(Bounds.of_case(case, overrides), scale=scale)
    return compare_dumps(f"golden:{case.folder}", str(found.service), Options(bounds=bounds))


def compare_with_reference(reference: str, found: RemoteReplay, precision: Precision) -> Comparison:
    """Compare what a service computed with the engine's step on the same datums: every quantity of both.

    Every byte has to be the same, but in float64, where other ranks may add in another order.
    """
    given = SEMANTICS if precision is Precision.FLOAT64 else BITWISE
    return compare_dumps(reference, str(found.service), Options(bounds=Bounds(given)))


def judged(one: Replay, found: Comparison, *, masked: bool) -> list[Verdict]:
    """Return the verdicts of a comparison at the places of the case.

    Args:
        masked: True if the wire carried the loss mask.

    Raises:
        CompareError: if anything could not be compared, or a quantity of the case was not.
    """
    if found.problems:
        raise CompareError(found.problems[0])
    kept = [v for v in found.verdicts if _belongs(one, v, masked)]
    missing = {*quantities(one.precision)} - {verdict.quantity for verdict in kept}
    if missing:
        raise CompareError(f"""{min(missing)} was not compared: the service's dump {found.actual} has none of it; dump
        it with WEAVER_DEBUG_DUMP_OPTIONS""")
    planned = [update.place for update in one.plan]
    return [replace(verdict, place=_of_case(verdict.place, planned)) for verdict in kept]


def _belongs(one: Replay, verdict: Verdict, masked: bool) -> bool:
    if one.precision is not Precision.FLOAT32:
        return True
    known = masked or verdict.name.rpartition("/")[2] not in MASKS
    return known and verdict.quantity in (*quantities(one.precision), "coverage")


def _of_case(place: Place, planned: Sequence[Place]) -> Place:
    """Return the place of an update in the case; a service counts its updates and knows no rollouts."""
    if place.step is None or place.update is not None or not 0 <= place.step < len(planned):
        return place
    return replace(place, step=planned[place.step].step, update=planned[place.step].update)


def scene_of(one: Replay, found: Comparison) -> RunContext:
    """Return the facts of a replay, for its diagnosis: those that the two compared dumps tell."""
    return replace(run_context_of(found), commands=commands(one))
