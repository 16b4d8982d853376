"""Judgement of a replay: each record against the golden values, or byte for byte against its bitwise reference.

A tolerance under which a shuffled tensor passes proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from regress.compare.dumps.golden_source import token_text
from regress.compare.metrics.striped_measures import largest
from regress.compare.quantities import ADDED, METRICS, Kind, order_of, quantity_named
from regress.compare.update_judge import judge_bitwise, judge_update
from regress.compare.update_records import Records
from regress.compare.updates.invariant_counts import QUANTITY
from regress.compare.updates.update_invariants import judge_invariants
from regress.compare.verdicts.tolerance import EXACT, Tolerance, Tolerances, tolerance_of
from regress.compare.verdicts.tolerance_overrides import Overrides
from regress.compare.verdicts.verdict import Status, Verdict
from regress.dump.coordinates import Place
from regress.dump.dump_reader import DumpReader
from regress.dump.numpy_arrays import Array, dtype_name
from regress.dump.record import Record
from regress.golden.golden_case import GoldenCase
from regress.replay.case_reads import trajectories_of, truth_of
from regress.replay.metrics_judge import judge_metrics_file
from regress.replay.replay_plan import PlannedUpdate
from regress.replay.rollout_judge import RolloutJudge
from regress.replay.update_facts import related_values_of
from regress.replay.variant import TIERS, Precision

WIDE = ("weights", "grad_norm", *METRICS)
"""Quantities that are float64 in every precision: denominators, and numbers that are written as text."""

Truth = Mapping[str, Mapping[str, Array]]


def judge_replay(
    case: GoldenCase,
    dump: DumpReader,
    plan: Sequence[PlannedUpdate],
    precision: Precision,
    *,
    truth: Callable[[str], Truth] | None = None,
    tolerance: Callable[[str], Tolerance | None] | None = None,
    explained: bool = True,
) -> list[Verdict]:
    """Return all verdicts on a dump, in the order of computation.

    Args:
        plan: expected updates of the replay.
        truth: golden values of an update, in place of the stored ones; which a replay that rounding took into other
            branches of the clip is otherwise judged by, see `regress.replay.branch_truth`.
        tolerance: tolerance of a quantity, in place of the stored one; None leaves the quantity out.
        explained: False where no verdict is diagnosed: a failure then does not tell what is affected, which takes most
            of the time where much fails.
    """
    bound = tolerance or stored_tolerances(case, precision)
    judged = partial(verdicts_in_order, case, dump, plan, precision, bound=bound, explained=explained)
    found = list(judged(golden=truth or truth_of(case)))
    if truth is None and _after_ratios(found) and precision in TIERS["precision"]:
        from regress.replay.branch_truth import branch_truth  # repeats the case, for which it loads torch

        taken = branch_truth(case, dump, plan, truth_of(case))
        if taken is not None:
            return [*judged(golden=taken.truth), *taken.verdicts]
    return found


def _after_ratios(verdicts: Sequence[Verdict]) -> bool:
    """Return True if what fails first is the value of a quantity that ratios go into."""
    first = next((verdict for verdict in verdicts if not verdict.ok), None)
    if first is None or first.status is not Status.DRIFT:
        return False
    return order_of(first.quantity) > order_of("ratio")


def verdicts_in_order(
    case: GoldenCase,
    dump: DumpReader,
    plan: Sequence[PlannedUpdate],
    precision: Precision,
    golden: Callable[[str], Truth],
    bound: Callable[[str], Tolerance | None],
    *,
    explained: bool = True,
) -> Iterator[Verdict]:
    """Yield the verdicts of `judge_replay`; who stops at the first that fails leaves the later updates unread."""
    text = token_text(case)
    seen: list[Truth] = []
    rollouts = RolloutJudge(case, dump, precision, plan, bound, golden)
    earlier = earlier_updates(case)
    later = {before: where for where, before in earlier.items() if before is not None}
    for step in trajectories_of(case):
        yield from rollouts.verdicts(step)
        for update in (update for update in plan if update.step == step):
            values, records = golden(update.where), records_of(dump, update)
            yield from judge_update(
                records,
                values,
                update.frame,
                bound,
                place=update.place,
                planned=update.records,
                dtype=partial(expected_dtype, values, precision, computes=_computes(dump, precision)),
                text=text,
                config=dump.manifest.provenance.config,
                related=related_values_of(case, update, earlier.get(update.where), later.get(update.where))
                if explained
                else None,
            )
            yield from invariants_of(dump, update, records)
            seen.append(values)
    if plan:  # as measured: a user who scales tolerances accepts that less can fail
        measured = stored_tolerances(case, precision)
        yield judge_rolled(seen, measured, plan[0].place)
    yield from judge_metrics_file(dump, plan, partial(records_of, dump))


def judge_by_bitwise_reference(
    case: GoldenCase, dump: DumpReader, bitwise_reference: DumpReader, plan: Sequence[PlannedUpdate]
) -> list[Verdict]:
    """Return all verdicts of a byte-for-byte comparison with the replay of another variant."""
    verdicts: list[Verdict] = []
    bound = stored_tolerances(case, Precision.FLOAT32)
    rollouts = RolloutJudge(case, dump, Precision.BITWISE, plan, bound, case.truth)
    for step in trajectories_of(case):
        verdicts += rollouts.verdicts(step)
        for update in (update for update in plan if update.step == step):
            records = records_of(dump, update)
            verdicts += judge_bitwise(
                records,
                records_of(bitwise_reference, update),
                update.frame,
                place=update.place,
                planned=update.records,
                text=token_text(case),
            )
            verdicts += invariants_of(dump, update, records)
    return [*verdicts, *judge_metrics_file(dump, plan, partial(records_of, dump))]


def earlier_updates(case: GoldenCase) -> dict[str, str]:
    """Return the update before each, by name; the first has none."""
    names = case.wheres()
    return dict(zip(names[1:], names[:-1], strict=True))


def invariants_of(dump: DumpReader, update: PlannedUpdate, records: Sequence[Record]) -> list[Verdict]:
    """Return the verdicts on the invariants of an update and its records, whatever its golden values are."""
    return judge_invariants(
        Records.of(records, update.frame),
        place=update.place,
        planned=update.records,
        config=dump.manifest.provenance.config,
        mesh=update.ranks.mesh,
    )


def records_of(dump: DumpReader, update: PlannedUpdate) -> list[Record]:
    """Return the records of one optimizer update."""
    entries = dump.manifest.files
    names = (name for name in dump.names(step=update.step) if entries[name].type != "trajectory")
    return [dump.read(name) for name in names if entries[name].where.update == update.update]


def stored_tolerances(
    case: GoldenCase, precision: Precision, scale: float = 1.0, overrides: Overrides | None = None
) -> Tolerances:
    """Return the tolerance of each quantity, times ``scale``; None where the manifest says that it cannot be judged.

    Args:
        overrides: tolerances that the project sets by hand.
    """
    measured = (overrides or Overrides()).over(
        partial(_measured, case, precision), case=case.name, precision=str(precision)
    )

    def of(quantity: str) -> Tolerance | None:
        found = measured(quantity)
        return None if found is None else found.scaled(scale)

    return of


def _measured(case: GoldenCase, precision: Precision, quantity: str) -> Tolerance | None:
    """Return the manifest's tolerance of a quantity; None for one that was added after the recording of the case."""
    if quantity in case.leaves_out:
        return None
    entry = case.tolerance(quantity, precision.measured_as)
    if entry is None and quantity in ADDED and not _recorded(case, quantity):
        return None
    if entry is None:
        unmeasured = Tolerance(0.0, reason=f"none was measured: run regress golden calibrate {case.name}")
        return EXACT if quantity_named(quantity).exact else unmeasured
    return tolerance_of(entry)


def _recorded(case: GoldenCase, quantity: str) -> bool:
    """Return True if any update of a case has golden values of a quantity."""
    return any(quantity in case.quantities(where) for where in case.wheres())


def _computes(dump: DumpReader, precision: Precision) -> str:
    """Return the dtype of activations: that of the precision, or one that the variant names."""
    parallel: Mapping[str, object] = dump.manifest.provenance.config.get("parallel") or {}
    named = parallel.get("fsdp_param_dtype")
    return str(named) if named and parallel.get("fsdp", 1) != 1 else precision.computes_in


def expected_dtype(
    truth: Truth, precision: Precision, quantity: str, name: str, *, computes: str | None = None
) -> str | None:
    """Return the element type of a recorded tensor: float64 in the golden values becomes the precision's type.

    Args:
        computes: dtype of activations, if it is not that of the precision.
    """
    golden = truth.get(quantity, {}).get(name)
    if golden is None:
        return None
    if dtype_name(golden.dtype) != "float64":
        return dtype_name(golden.dtype)
    if quantity in WIDE:
        return "float64"
    if quantity in ("activations", "logit_gradient"):
        return computes or precision.computes_in
    native = quantity_named(quantity).native
    return precision.dtype if native or precision is Precision.FLOAT64 else "float32"


NAME = "rolled"
_REASON = "what is rolled by one place must fail, or the comparison could not"


def judge_rolled(
    truths: Sequence[Mapping[str, Mapping[str, Array]]],
    tolerances: Callable[[str], Tolerance | None],
    place: Place,
) -> Verdict:
    """Return one verdict for the golden values of all updates: some tensor of every quantity must fail when rolled.

    Quantities whose tensors hold one value each (sums and numbers) cannot be rolled, and are left out.

    Args:
        place: place of the verdict: the first of the updates.
    """
    noticed, blind = 0, []
    for quantity in dict.fromkeys(quantity for truth in truths for quantity in truth):
        tolerance = tolerances(quantity)
        if tolerance is None or quantity_named(quantity).kind in (Kind.SHARE, Kind.SCALAR):
            continue
        moved = [_moved(values) for truth in truths for values in truth.get(quantity, {}).values()]
        shares = [share for share in moved if share is not None]
        if shares and max(shares) <= tolerance.relative:
            blind.append(
                f"{quantity} ({max(shares):.3g} of the scale, tolerated are {tolerance.relative:.3g})"
            )
        noticed += len(shares)
    if not blind:
        return Verdict(Status.OK, QUANTITY, NAME, place, count=noticed, reason=_REASON)
    detail = f"values that are rolled by one place pass: {', '.join(blind)}; measure the tolerance again"
    return Verdict.fault(Status.DRIFT, QUANTITY, NAME, place, detail, len(blind), count=noticed)


def _moved(values: Array) -> float | None:
    """Return how far a tensor moves when rolled, as a fraction of its largest value; None for one that cannot move."""
    wide = values.astype(np.float64).reshape(-1)
    if wide.size < 2 or not np.isfinite(wide).all() or not np.any(wide != wide[0]):
        return None
    return float(np.abs(np.roll(wide, 1) - wide).max()) / largest(values)
