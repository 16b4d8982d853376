"""Records that a single dump lacks although its other records say that there were some."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from regress.compare.dumps.listing import Listed
from regress.compare.dumps.sides import Side
from regress.compare.dumps.single import stage_of_pipeline
from regress.compare.quantities import MICRO_STAGES, UPDATE_STAGES
from regress.compare.updates.coverage import QUANTITY
from regress.compare.verdicts.verdict import Place, Status, Verdict

EVERYWHERE = ("batch_inputs", "forward_data")
"""Types that are written for every microbatch, if for any."""
CAPTURED = (*EVERYWHERE, "loss", "token_gradient")
"""Those that `regress.record` writes for every microbatch, if for any."""
BESIDE = {
    "gradient": ("param", "optimizer"),
    "param": ("optimizer",),
    "optimizer": ("param",),
}
"""Types of an update, and those that are written only together with them, where both are recorded at all."""
REMEDY = "copy or record it again"


def gaps(side: Side, records: Sequence[Listed], place: Place) -> Iterator[Verdict]:
    """Yield verdicts on records that one update lacks."""
    yield from _whole_types(side, records, place)
    yield from _microbatches(side, records, place)
    yield from exchanged(records, place)
    yield from _of_parameters(side, records, place)


def lost_steps(side: Side) -> Iterator[Verdict]:
    """Yield a verdict on steps that a recording of a trainer lacks: it counts from 0, in even strides."""
    kinds = (*MICRO_STAGES, *UPDATE_STAGES)
    steps = sorted({where.step for type, where in side.entries.values() if type in kinds})
    capture = side.config.get("capture")
    if not isinstance(capture, Mapping) or not capture or not steps:
        return
    told = capture.get("every_n_steps")
    least = min((after - before for before, after in pairwise(steps)), default=steps[0] or 1)
    stride = told if isinstance(told, int) and told > 0 else least
    lost = sorted({*range(0, steps[-1], stride)} - {*steps})
    if lost:
        some = ", ".join(map(str, lost[:4])) + (f" and {len(lost) - 4} more" if len(lost) > 4 else "")
        detail = f"step {some} is missing among those that were recorded ({len(steps)} of them): {REMEDY}"
        yield _lost("steps", Place(lost[0]), detail)


def _whole_types(side: Side, records: Sequence[Listed], place: Place) -> Iterator[Verdict]:
    """Yield verdicts on types that the run says it recorded, and of which the update has nothing."""
    there = {record.key.stage for record in records}
    debug = side.config.get("debug")
    options = debug.get("dump_options") if isinstance(debug, Mapping) else None
    asked = options if isinstance(options, Mapping) else {}
    if not there:
        return
    for stage in EVERYWHERE:
        if stage not in there and (side.config.get("capture") or asked.get(stage) is True):
            other = next(record.key.stage for record in records)
            yield _lost(stage, place, f"no {stage} was recorded of the update, though {other} was: {REMEDY}")


def _microbatches(side: Side, records: Sequence[Listed], place: Place) -> Iterator[Verdict]:
    """Yield verdicts on microbatches that lack a type which others of the same pipeline stage have."""
    there: dict[tuple[int, int | None], set[str]] = {}
    for record in records:
        if record.key.stage in MICRO_STAGES:
            there.setdefault((record.key.rank or 0, record.key.micro), set()).add(record.key.stage)
    pipeline = stage_of_pipeline(side)
    known: dict[int, set[str]] = {}
    for (rank, _), stages in there.items():
        known.setdefault(pipeline(rank), set()).update(stages)
    wanted = CAPTURED if side.config.get("capture") else EVERYWHERE
    for (rank, micro), stages in sorted(there.items(), key=str):
        for stage in wanted:
            if stage in known[pipeline(rank)] and stage not in stages:
                where = Place(place.step, place.update, rank, micro)
                words = "" if micro is None else f" of microbatch {micro}"
                detail = f"{stage}{words} is missing, though it has {min(stages)}: {REMEDY}"
                yield _lost(stage, where, detail)


def exchanged(records: Sequence[Listed], place: Place) -> Iterator[Verdict]:
    """Yield verdicts on records of a microbatch that hold samples which its inputs do not."""
    inputs = {
        (record.key.rank, record.key.micro): set(record.samples)
        for record in records
        if record.key.stage == "batch_inputs" and record.samples
    }
    for record in records:
        own = inputs.get((record.key.rank, record.key.micro))
        if own is None or record.key.stage not in MICRO_STAGES:
            continue
        strange = next((key for key in record.samples if key not in own), None)
        if strange is not None:
            where = Place(place.step, place.update, record.key.rank, record.key.micro)
            detail = (
                f"{record.key} holds sample {strange[0]}/{strange[1]}, which its batch_inputs do not: records of ranks "
                "or microbatches were exchanged; record again"
            )
            yield _lost(record.key.stage, where, detail)


def _of_parameters(side: Side, records: Sequence[Listed], place: Place) -> Iterator[Verdict]:
    """Yield verdicts on gradients, parameters and states that ranks lack, though other updates have them."""
    if not side.config.get("capture"):
        return
    everywhere = {(type, where.rank or 0) for type, where in side.entries.values()}
    there: dict[int, set[str]] = {}
    for record in records:
        there.setdefault(record.key.rank or 0, set()).add(record.key.stage.removesuffix("_clipped"))
    for rank, stages in sorted(there.items()):
        for stage, beside in BESIDE.items():
            other = next((one for one in beside if one in stages), None)
            if other is not None and stage not in stages and (stage, rank) in everywhere:
                detail = f"{stage} is missing, though {other} of the update is there: {REMEDY}"
                yield _lost(stage, Place(place.step, place.update, rank), detail)


def _lost(name: str, place: Place, detail: str) -> Verdict:
    return Verdict.fault(Status.COVERAGE, QUANTITY, name, place, detail, 1)
