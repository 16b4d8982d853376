"""Judgement of a single dump without golden values: invariants of every update, and agreement between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from regress.compare.alignment.keys import key_of
from regress.compare.alignment.locate import Locator
from regress.compare.alignment.spans import Spans
from regress.compare.quantities import MICRO_STAGES
from regress.compare.updates.checked import QUANTITY as INVARIANTS
from regress.compare.updates.group_sums import GroupOf
from regress.compare.updates.invariants import judge_invariants
from regress.compare.updates.plan import Groups, Plan
from regress.compare.updates.record_index import RecordIndex
from regress.compare.updates.replicas import Replicas
from regress.compare.verdicts.verdict import Place, Verdict
from regress.dump.record import Record
from regress.errors import CompareError
from regress.layout import SampleKey, TokenFrame


def check_records(
    records: Sequence[Record],
    quantity: str,
    *,
    place: tuple[int, int | None],
    roots: Mapping[int, int] | None = None,
    config: Mapping[str, Any] | None = None,
    groups: GroupOf | None = None,
    leave: Callable[[str, str], None] = lambda name, why: None,
) -> list[Verdict]:
    """Return verdicts on one update, whose samples are found in its records.

    Args:
        quantity: ``invariants``, or ``replicas``: agreement between ranks.
        roots: see `plan_of`.
        groups, leave: see `judge_invariants`.
    """
    frame = frame_of(records)
    placed = RecordIndex(records, frame)
    plan = plan_of(placed, records, roots)
    if quantity == INVARIANTS:
        return judge_invariants(
            records, frame, place=place, planned=plan, config=config, groups=groups, leave=leave
        )
    return [*Replicas(Groups(placed, plan), Locator(frame), Place(*place)).verdicts()]


def frame_of(records: Sequence[Record]) -> TokenFrame:
    """Return the samples that records name, each with the largest number of tokens that any of them holds."""
    lengths: dict[SampleKey, int] = {}
    for record in records:
        for key, stop in _segments(record):
            lengths[key] = max(lengths.get(key, 0), stop)
    return TokenFrame(tuple(lengths), tuple(lengths.values()))


def _segments(record: Record) -> Iterator[tuple[SampleKey, int]]:
    try:
        spans = Spans.of(record.meta, record.type)
    except CompareError:
        return  # a record without tokens, or one that says nothing of them
    for key, _, stop, _, _ in spans.segments:
        yield key, stop


def plan_of(placed: RecordIndex, records: Sequence[Record], roots: Mapping[int, int] | None = None) -> Plan:
    """Infer the plan of an update from its records: ranks, microbatches, and ranks that repeat each other.

    Args:
        roots: rank -> the rank whose tokens it repeats, if a mesh tells it; otherwise ranks repeat each other whose
            tokens lie alike in all microbatches.
    """
    known = {key_of(record) for record in records if record.type in MICRO_STAGES}
    keys = sorted(known, key=lambda key: (MICRO_STAGES.index(key.stage), key.rank or 0, key.micro or 0))
    micros = tuple(dict.fromkeys((key.rank or 0, key.micro or 0) for key in keys))
    if roots is not None and any(rank != root for rank, root in roots.items()):
        return Plan(micros, roots)
    tokens: dict[int, list[object]] = {}
    for key in keys:
        if key.stage == keys[0].stage:
            tokens.setdefault(key.rank or 0, []).append(placed.layouts.get(key))
    replicas = {}
    for rank, own in tokens.items():
        same = next(other for other, theirs in tokens.items() if theirs == own)
        if same != rank and None not in own:
            replicas[rank] = same
    return Plan(micros, replicas)
