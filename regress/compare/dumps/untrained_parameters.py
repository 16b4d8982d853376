"""Parameters that one of two trainers leaves as they are: frozen, without an optimizer, or out of the loss's reach."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

from regress.compare.dumps.opened_dump import Side
from regress.compare.quantities import UPDATE_TYPES
from regress.compare.record_header import Header
from regress.dump.record import Record

FROZEN = (
    "it is frozen there (requires_grad=False), in no optimizer, or no gradient reaches it: compare which parameters "
    "the two trainers train"
)
"""Causes for the reader of a failure."""


def untrained(record_type: str, name: str, holders: Iterable[Header], side: Side, other: Side) -> str | None:
    """Return why a tensor of a parameter that only ``side`` has is a failure; None if nothing says that it is one.

    A gradient of zero is none: some trainers have it where others have nothing, as for an expert without tokens.
    """
    if record_type not in UPDATE_TYPES or record_type == "gradient_clipped":
        return None
    parameter, _, kind = name.rpartition("/") if record_type == "optimizer" else (name, "", "")
    records = [side.read(record.name) for record in holders]
    if record_type == "optimizer":
        trained = _has_state(other, kind) and any(_moved(record, parameter) for record in records)
    else:
        trained = _wanted(other, record_type, name) and (
            _nonzero(records, name) if record_type == "gradient" else _trained(side, records, name)
        )
    if not trained:
        return None
    what = {"gradient": "gradient", "param": "trained value", "optimizer": "optimizer state"}[record_type]
    return f"no {what} of {parameter}: {FROZEN}"


def is_zero(record_type: str, name: str, holders: Iterable[Header], side: Side) -> bool:
    """Return True for a gradient, or a moment, that is zero everywhere."""
    if record_type == "optimizer":
        parameter = name.rpartition("/")[0]
        return not any(_moved(side.read(record.name), parameter) for record in holders)
    return record_type == "gradient" and not _nonzero((side.read(record.name) for record in holders), name)


def _wanted(side: Side, record_type: str, name: str) -> bool:
    """Return True if a recording says that it kept a tensor of that name, had there been one."""
    kept = (side.config.get("capture") or {}).get("kept")
    pattern = kept.get(record_type) if isinstance(kept, dict) else None
    if not isinstance(pattern, str):
        return pattern is True
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return False


def _has_state(side: Side, kind: str) -> bool:
    """Return True if an optimizer has this kind of state of any parameter."""
    records = (name for name, (type, _) in side.entries.items() if type == "optimizer")
    return any(one.rpartition("/")[2] == kind for name in records for one in side.read(name).tensors)


def _moved(record: Record, parameter: str) -> bool:
    moments = (v for one, v in record.tensors.items() if one.startswith(f"{parameter}/") and v.ndim)
    return any(bool(np.any(values != 0)) for values in moments)


def _nonzero(records: Iterable[Record], name: str) -> bool:
    return any(bool(np.any(record.tensors[name] != 0)) for record in records if name in record.tensors)


def _trained(side: Side, records: Iterable[Record], name: str) -> bool:
    """Return True if the update of some parameter's records had a gradient of it that is not zero."""
    places = {record.where.of_update for record in records}
    gradients = (
        side.read(one)
        for one, (type, where) in side.entries.items()
        if type == "gradient" and where.of_update in places
    )
    return _nonzero(gradients, name)
