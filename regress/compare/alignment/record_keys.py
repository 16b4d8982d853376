"""Records of one update by their place, with their token layouts in the indices of the canonical frame."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from regress.compare.alignment.token_spans import NO_LAYOUT, Spans
from regress.compare.quantities import MICRO_TYPES, STEP_TYPES
from regress.dump.numpy_arrays import Array
from regress.dump.record import Record
from regress.errors import CompareError
from regress.layout import TokenFrame, TokenLayout


class Key(NamedTuple):
    """Type, rank and microbatch of a record. A recording without ranks is that of rank 0."""

    record_type: str
    rank: int | None
    micro: int | None

    def __str__(self) -> str:
        """Return text such as ``forward_data of rank 0 microbatch 1``."""
        parts = [
            f"{word} {value}"
            for word, value in zip(("rank", "microbatch"), self[1:], strict=True)
            if value is not None
        ]
        return f"{self.record_type} of {' '.join(parts)}" if parts else self.record_type


def key_of(record: Record) -> Key:
    """Return the place of a record within its update."""
    if record.type in STEP_TYPES:
        return Key(record.type, record.rank, record.micro)
    micro = record.micro
    if micro is None and record.type in MICRO_TYPES:  # an update of one microbatch need not count it
        micro = 0
    return Key(record.type, record.rank or 0, micro)


def norm_of(record: Record | None) -> Array | None:
    """Return the norm in the metadata of a record of gradients, as float64; None where nothing tells it."""
    norm = None if record is None else record.meta.get("grad_norm")
    return np.array(norm, np.float64) if isinstance(norm, int | float) else None


def canonical_layout(record: Record, frame: TokenFrame) -> TokenLayout:
    """Return the token layout of a record, its samples numbered as in the frame.

    Segments are matched by the keys in ``meta["samples"]``, one ``[group_id, run_id]`` a segment, since a rank may
    count its own samples only.

    Raises:
        CompareError: if the record has no layout, or one that does not fit the frame.
    """
    spans, name, index = Spans.of(record.meta, str(key_of(record))), str(key_of(record)), frame.index
    if why := spans.misfit(name, frame):
        raise CompareError(why)
    try:
        return spans.layout(index, frame)
    except ValueError as error:
        raise CompareError(f"{name} has no usable token layout ({error}): {NO_LAYOUT}") from None
