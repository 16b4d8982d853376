"""Form of what a client sends: advantages with their weights or without, all samples or those with advantages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from regress.compare.dumps.opened_dump import Side
from regress.compare.dumps.wire_view import ACTIVE, DROPPED, SUMMED, WEIGHTED, without_advantage
from regress.interop.modes.client_datums import client_of
from regress.interop.modes.mode_rows import ModeRow, pairs_of, rows_of
from regress.interop.service_dumps import ServiceDump
from regress.layout import SampleKey


def flags_for(trainer: Side, client: Side | None, service: Side | None, steps: Sequence[int]) -> set[str]:
    """Return the flags of the view of the trainer's dump that the others can be compared with.

    Weights count as sent if the others' advantages are nearer to the products than to the advantages alone, over all
    loss tokens. Samples without advantages count as dropped if the others have none of them, and as inactive if the
    service counts none of their tokens, as it must where the wire has no masks. Where no weights were recorded, nothing
    tells whether the trainer's sums are weighted, as those of a service are not.
    """
    nearer, dropped, kept, active, known = 0, 0, 0, set[bool](), False
    for step in steps:
        rows, others = rows_of(trainer, step), _others(client, service, step)
        if not others or any(row.tokens is None for row in others):
            continue
        pairs = pairs_of(rows, others)
        known = known or any("weights" in row.values for row in rows)
        nearer += sum(_nearer(a, b) for a, b in pairs)
        idle = without_advantage(trainer, step)
        there = sum(a.key in idle for a, _ in pairs)
        kept += there
        dropped += len(idle) - there
        active |= _inactive(rows, [] if service is None else rows_of(service, step), idle)
    unknown = service is not None and not known
    found = {
        WEIGHTED: nearer > 0,
        SUMMED: unknown,
        DROPPED: dropped > 0 and not kept,
        ACTIVE: active == {True},
    }
    if is_custom(client, service, steps):
        found[ACTIVE] = False  # its masks tell which weights are 0
    return {flag for flag, holds in found.items() if holds}


def is_custom(client: Side | None, service: Side | None, steps: Sequence[int]) -> bool:
    """Return True if the service computed with derivatives of a loss that its client computed."""
    if client is not None and any(client_of(client, step).custom for step in steps):
        return True
    passes = service.passes if isinstance(service, ServiceDump) else ()
    return any(one.loss == "surrogate" and one.step in steps for one in passes)


def _inactive(rows: Sequence[ModeRow], computed: Sequence[ModeRow], idle: set[SampleKey]) -> set[bool]:
    """Return whether the service counts no token of a sample without advantages, for each that it has."""
    pairs = pairs_of(rows, computed) if computed and all(row.tokens is not None for row in computed) else []
    known = [(a, b.mask) for a, b in pairs if a.key in idle]
    return {
        not mask[1:].any() for a, mask in known if mask is not None and a.mask is not None and a.mask.any()
    }


def _others(client: Side | None, service: Side | None, step: int) -> Sequence[ModeRow]:
    found = [] if client is None else client_of(client, step).rows
    return found or ([] if service is None else rows_of(service, step))


def _nearer(trainer: ModeRow, other: ModeRow) -> int:
    """Return 1 if advantages are nearer to products with weights, -1 if nearer to those alone, 0 if neither."""
    weights, own, found = (
        trainer.values.get("weights"),
        trainer.values.get("advantages"),
        other.values.get("advantages"),
    )
    mask = trainer.mask
    if weights is None or own is None or found is None or mask is None:
        return 0
    if not own.size == found.size == weights.size == mask.size:
        return 0
    here = mask & (np.nan_to_num(own) != 0) & (np.nan_to_num(weights) > 0)
    there = np.nan_to_num(found) != 0  # wherever they lie
    if not here.any() or not there.any():
        return 0
    level = np.log(np.median(np.abs(found[there])))
    plain = np.log(np.median(np.abs(own[here])))
    product = np.log(np.median(np.abs(own[here] * weights[here])))
    return int(np.sign(abs(level - plain) - abs(level - product)))
