"""Judgement of an update byte for byte against its bitwise reference: a computation of the same layout and order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from regress.compare.alignment.keys import Key, norm_of
from regress.compare.alignment.locate import Locator, TokenText
from regress.compare.quantities import (
    MICRO_STAGES,
    STEP_STAGES,
    UPDATE_STAGES,
    source_of,
)
from regress.compare.updates.plan import Groups, Plan
from regress.compare.updates.record_index import RecordIndex
from regress.compare.updates.replicas import Replicas
from regress.compare.verdicts.sequence import in_order
from regress.compare.verdicts.tensor import judge_tensor
from regress.compare.verdicts.tolerance import BITWISE
from regress.compare.verdicts.verdict import Place, Status, Verdict
from regress.dump.record import Record
from regress.layout import TokenFrame


def judge_bitwise(
    records: Iterable[Record],
    reference: Iterable[Record],
    frame: TokenFrame,
    *,
    place: tuple[int, int | None],
    planned: Plan | None = None,
    text: TokenText | None = None,
) -> list[Verdict]:
    """Return all verdicts on one optimizer update whose every byte, padding included, must equal its bitwise reference.

    Records and tensors are judged by the union of both sides, in the order of computation; ``golden`` in a verdict is
    the bitwise reference. ``planned`` tells which ranks repeat each other's tokens; by default none does. See
    `regress.compare.updates.golden.judge_update` for the other arguments.
    """
    golden = RecordIndex(reference, frame)
    actual = RecordIndex(records, frame)
    where = Place(*place)
    locator = Locator(frame, _token_ids(golden, frame), text)
    stages = [stage for stage in MICRO_STAGES if golden.of_stages([stage]) or actual.of_stages([stage])]
    plan = planned or Plan(())
    found = [*actual.structure(golden.holds, plan.root, stages, where, locator, golden.loss_tokens)]
    for stage in (*STEP_STAGES, *MICRO_STAGES, *UPDATE_STAGES):
        for key in golden.of_stages([stage]):
            found += _record(key, actual, golden, locator, where)
    found += Replicas(Groups(actual, plan), locator, where).verdicts()
    return in_order(found)


def _record(
    key: Key, actual: RecordIndex, golden: RecordIndex, locator: Locator, place: Place
) -> Iterator[Verdict]:
    place = replace(place, rank=key.rank, micro=key.micro)
    actual_record, golden_record = actual.get(key), golden.get(key)
    assert golden_record is not None
    problem = _misplaced(key, actual_record, actual, golden)
    for name in dict.fromkeys(
        [*(actual_record.tensors if actual_record is not None else ()), *golden_record.tensors]
    ):
        source = source_of(key.stage, name)
        if source is None:
            continue  # a verdict on the coverage of this update already
        if problem is not None:
            yield Verdict(problem[0], source.quantity, source.label, place, problem[1])
            continue
        assert actual_record is not None
        expected = golden_record.tensors.get(name)
        yield judge_tensor(
            actual_record.tensors.get(name),
            expected,
            BITWISE,
            quantity=source.quantity,
            name=source.label,
            place=place,
            locate=None if expected is None else golden.words(key, source.quantity, expected.shape, locator),
        )
    if key.stage == "gradient":
        yield from _grad_norm(actual_record, golden_record, place)


def _misplaced(
    key: Key, actual_record: Record | None, actual: RecordIndex, golden: RecordIndex
) -> tuple[Status, str] | None:
    """Return why nothing in a record can be compared; None if it can."""
    if actual_record is None:
        return Status.MISSING, f"{key} was not recorded"
    if key in actual.misfits:
        return Status.COVERAGE, actual.misfits[key]
    if actual.layouts.get(key) != golden.layouts.get(key):
        return (
            Status.COVERAGE,
            f"the tokens of {key} lie elsewhere than in its bitwise reference, so bytes cannot be compared",
        )
    shards = [
        record.meta.get("shards") or {} for record in (actual_record, golden.get(key)) if record is not None
    ]
    if shards[0] != shards[-1]:
        return (
            Status.COVERAGE,
            f"{key} holds other shards than its bitwise reference, so bytes cannot be compared",
        )
    return None


def _grad_norm(actual_record: Record | None, golden_record: Record, place: Place) -> Iterator[Verdict]:
    actual, expected = norm_of(actual_record), norm_of(golden_record)
    if actual is not None or expected is not None:
        yield judge_tensor(actual, expected, BITWISE, quantity="grad_norm", name="grad_norm", place=place)


def _token_ids(golden: RecordIndex, frame: TokenFrame) -> NDArray[np.int64] | None:
    """Return the token ids ``[frame.size]`` that the bitwise reference read."""
    ids = np.zeros(frame.size, np.int64)
    found = False
    for key, layout in golden.layouts.items():
        record = golden.get(key)
        local = None if record is None else record.tensors.get("input_ids")
        if local is not None and local.shape == layout.shape:
            layout.gather(local, ids, frame.offsets)
            found = True
    return ids if found else None
