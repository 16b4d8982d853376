"""Sequences whose tokens several ranks share: their batch joined, and the slice of this rank cut out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import distributed

from regress.capture.layout_inference import Arrangement
from regress.errors import CaptureError
from regress.layout import Segment, TokenLayout


def gather_sequence(found: Arrangement, group: Any) -> tuple[Arrangement, int]:
    """Join the slices of a group's ranks along the columns; return the batch and this rank's first column.

    Raises:
        CaptureError: if the slices do not fit together.
    """
    parts: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(parts, found, group=group)
    return joined(parts, distributed.get_rank(group))


def joined(parts: Sequence[Arrangement], rank: int) -> tuple[Arrangement, int]:
    """Join slices of one batch; return the batch and the first column of one of them."""
    rows = {part.input_ids.shape[0] for part in parts}
    if len(rows) > 1:
        raise CaptureError(f"""the ranks of sequence_group hold {sorted(rows)} rows, but slices of the same sequences
        have as many: give the group whose ranks share each sequence""")
    values = {name: _side_by_side(name, parts) for name in ("attention_mask", "position_ids")}
    borders = [part.cu_seq_lens for part in parts]
    if any(b is None or borders[0] is None or not np.array_equal(b, borders[0]) for b in borders) and any(
        b is not None for b in borders
    ):
        raise CaptureError("""the ranks of sequence_group tell different cu_seq_lens: give the borders of the whole row
        with record(cu_seq_lens=...)""")
    ids = np.concatenate([part.input_ids for part in parts], 1)
    offset = sum(part.input_ids.shape[1] for part in parts[:rank])
    whole = Arrangement(
        ids, values["attention_mask"], values["position_ids"], borders[0], parts[0].pad_token_id
    )
    return whole, offset


def _side_by_side(name: str, parts: Sequence[Arrangement]) -> Any:
    found = [getattr(part, name) for part in parts]
    known = [value for value in found if value is not None]
    if not known:
        return None
    if len(known) < len(found):
        raise CaptureError(
            f"some ranks of sequence_group tell {name} and others do not: pass it on all of them"
        )
    return np.concatenate(found, 1)


def sliced(whole: TokenLayout, offset: int, width: int) -> tuple[TokenLayout, TokenLayout]:
    """Return layouts of the tokens in some columns, and of those they predict, at the states' places."""
    tokens, targets = [], []
    for s in whole.segments:
        first, last = max(s.col, offset), min(s.col + s.stop - s.start, offset + width)
        if first >= last:
            continue
        start = s.start + first - s.col
        stop, col = start + last - first, first - offset
        tokens.append(Segment(s.sample, start, stop, s.row, col))
        if min(stop + 1, s.stop) > start + 1:
            targets.append(Segment(s.sample, start + 1, min(stop + 1, s.stop), s.row, col))
    shape = (whole.shape[0], width)
    return TokenLayout(shape, tuple(tokens)), TokenLayout(shape, tuple(targets))
