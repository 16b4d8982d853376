"""Records of one update by their place, with their token layouts in the indices of the canonical frame."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from regress.compare.alignment.spans import NO_LAYOUT, Spans
from regress.compare.quantities import MICRO_STAGES, STEP_STAGES
from regress.dump.arrays import Array
from regress.dump.record import Record
from regress.errors import CompareError
from regress.layout import TokenFrame, TokenLayout


class Key(NamedTuple):
    """Stage, rank and microbatch of a record. A recording without ranks is that of rank 0."""

    stage: str
    rank: int | None
    micro: int | None

    def __str__(self) -> str:
        """Return text such as ``forward_data of rank 0 microbatch 1``."""
        parts = [
            f"{word} {value}"
            for word, value in zip(("rank", "microbatch"), self[1:], strict=True)
            if value is not None
        ]
        return f"{self.stage} of {' '.join(parts)}" if parts else self.stage


def key_of(record: Record) -> Key:
    """Return the place of a record within its update."""
    if record.type in STEP_STAGES:
        return Key(record.type, record.rank, record.micro)
    micro = record.micro
    if micro is None and record.type in MICRO_STAGES:  # an update of one microbatch need not count it
        micro = 0
    return Key(record.type, record.rank or 0, micro)


def norm_of(record: Record | None) -> Array | None:
    """Return the norm in the metadata of a record of gradients, as float64; None where nothing tells it."""
    norm = None if record is None else record.meta.get("grad_norm")
    return np.array(norm, np.float64) if isinstance(norm, int | float) else None


def by_place(records: Iterable[Record]) -> dict[Key, list[Record]]:
    """Return the records at each place, where there should be one."""
    found: dict[Key, list[Record]] = {}
    for record in records:
        found.setdefault(key_of(record), []).append(record)
    return found


def canonical_layout(record: Record, frame: TokenFrame) -> TokenLayout:
    """Return the token layout of a record, its samples numbered as in the frame.

    Segments are matched by the keys in ``meta["samples"]``, one ``[group_id, run_id]`` a segment, since a rank may
    count its own samples only.

    Raises:
        CompareError: if the record has no layout, or one that does not fit the frame.
    """
    return _layout(record.meta, str(key_of(record)), frame)


def rows_layout(record: Record, frame: TokenFrame) -> TokenLayout | None:
    """Return the layout of rows of loss tokens (logits) in ``meta["rows"]``; None for the record's own.

    Raises:
        CompareError: as `canonical_layout`.
    """
    rows: Any = record.meta.get("rows")
    return None if rows is None else _layout(rows, f"meta['rows'] of {key_of(record)}", frame)


def _layout(meta: Mapping[str, Any], name: str, frame: TokenFrame) -> TokenLayout:
    spans = Spans.of(meta, name)
    index = frame.index
    for key, _, stop, _, _ in spans.segments:
        words = f"{key[0]}/{key[1]}"
        if key not in index:
            raise CompareError(f"{name} holds sample {words}, which does not belong to this update")
        if stop > frame.lengths[index[key]]:
            raise CompareError(
                f"{name} holds {stop} tokens of sample {words}, which has {frame.lengths[index[key]]}"
            )
    try:
        return spans.layout(index, frame)
    except ValueError as error:
        raise CompareError(f"{name} has no usable token layout ({error}): {NO_LAYOUT}") from None
