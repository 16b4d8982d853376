"""Inference of the places of a batch's samples from the inputs of the model.

Ambiguous inputs are refused with the argument that decides between the readings. This module uses numpy only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regress.errors import CaptureError
from regress.layout import Segment, TokenLayout

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Arrangement:
    """Inputs of a batch that tell its layout; everything but the ids may be absent.

    Attributes:
        input_ids: ``[B, T]``.
        attention_mask: ``[B, T]``, 1 where a token lies, or the number of its sample (1, 2, 3 ...) in packed rows.
        position_ids: ``[B, T]``, restarted for each sample of a packed row.
        cu_seq_lens: ``[N + 1]`` borders of the samples of one packed row.
        pad_token_id: id that stands for padding at the ends of rows without a mask; None where none is known.
    """

    input_ids: Ints
    attention_mask: Ints | None = None
    position_ids: Ints | None = None
    cu_seq_lens: Ints | None = None
    pad_token_id: int | None = None


def infer_layout(found: Arrangement) -> TokenLayout:
    """Find the layout of a batch; segments are numbered in the order of rows and columns.

    Raises:
        CaptureError: if the batch can be read in two ways, or its inputs contradict each other.
    """
    shape = (int(found.input_ids.shape[0]), int(found.input_ids.shape[1]))
    _check_shapes(found, shape)
    if found.cu_seq_lens is not None:
        spans = list(_from_borders(found.cu_seq_lens, found, shape))
    else:
        spans = [(row, *span) for row in range(shape[0]) for span in _in_row(found, row)]
    segments = (
        Segment(number, 0, stop - start, row, start) for number, (row, start, stop) in enumerate(spans)
    )
    return TokenLayout(shape, tuple(segments))


def _check_shapes(found: Arrangement, shape: tuple[int, int]) -> None:
    for name in ("attention_mask", "position_ids"):
        value = getattr(found, name)
        if value is not None and value.shape != shape:
            raise CaptureError(f"""{name} has the shape {list(value.shape)}, but input_ids has {list(shape)}: give
            record({name}=...) a function of the forward arguments that returns one value for each token""")


def _from_borders(
    borders: Ints, found: Arrangement, shape: tuple[int, int]
) -> Iterator[tuple[int, int, int]]:
    rows, columns = shape
    if (
        rows != 1
        or borders.ndim != 1
        or not borders.size
        or borders[0] != 0
        or borders[-1] > columns
        or (np.diff(borders) < 0).any()
    ):
        raise CaptureError(f"""cu_seq_lens {_short(borders)} are not rising borders of one packed row of {columns}
        tokens ({rows} rows were given): correct them, or name the right argument with record(cu_seq_lens=...)""")
    stop = int(borders[-1])
    if found.attention_mask is not None and found.attention_mask[0, stop:].any():
        raise CaptureError(f"""cu_seq_lens end at token {stop}, but the attention mask has tokens behind it: correct one
        of the two, or name the right argument with record(cu_seq_lens=...)""")
    for start, end in zip(borders.tolist(), borders[1:].tolist(), strict=False):
        if end > start:
            _refuse_restarts(found, start, end)
            yield 0, start, end


def _refuse_restarts(found: Arrangement, start: int, end: int) -> None:
    """Refuse a segment in which position ids begin anew and go on; those of padding stay what they are."""
    if found.position_ids is None:
        return
    own = found.position_ids[0, start:end]
    anew = np.flatnonzero((np.diff(own[:-1]) < 0) & (own[1:-1] == own[0]) & (np.diff(own[1:]) == 1)) + 1
    if anew.size:
        raise CaptureError(f"""cu_seq_lens say that columns {start} to {end - 1} are one sample, and position_ids begin
        anew at column {start + int(anew[0])}: correct one of the two, or name the right argument with
        record(cu_seq_lens=...) or record(position_ids=...)""")


def _in_row(found: Arrangement, row: int) -> Iterator[tuple[int, int]]:
    """Yield the column ranges of the samples of a row."""
    mask, positions = found.attention_mask, found.position_ids
    if mask is not None:
        _refuse_holes(row, mask[row], None if positions is None else positions[row])
    for start, stop in _live(found, row):
        cuts = (
            [] if positions is None else _restarts(positions[row, start:stop], row, start, mask is not None)
        )
        yield from _split(start, stop, cuts)


def _refuse_holes(row: int, mask: Ints, positions: Ints | None) -> None:
    """Refuse several runs of ones in a mask, unless position ids start anew at each."""
    runs = _runs(mask)
    if len(runs) < 2 or int(mask.max(initial=0)) > 1:
        return
    if positions is None or any(positions[start] != positions[runs[0][0]] for start, _ in runs):
        raise CaptureError(f"""row {row} of the attention mask has {len(runs)} runs of ones, which may be {len(runs)}
        packed samples or one with holes: name position ids that restart with record(position_ids=...), or borders with
        record(cu_seq_lens=...)""")


def _live(found: Arrangement, row: int) -> list[tuple[int, int]]:
    """Return the column ranges that hold tokens: runs of equal non-zero values in the mask, or what is not padding."""
    if found.attention_mask is not None:
        return _runs(found.attention_mask[row])
    ids = found.input_ids[row]
    if found.pad_token_id is None or (found.position_ids is not None and _packed(found.position_ids[row])):
        return [(0, ids.size)] if ids.size else []
    ends = [ids[0] == found.pad_token_id, ids[-1] == found.pad_token_id] if ids.size else []
    if any(ends):
        raise CaptureError(
            f"row {row} of input_ids {'starts' if ends[0] else 'ends'} with the padding token "
            f"{found.pad_token_id} and no "
            "attention mask tells whether it is padding: pass one to the model, or name it with "
            'record(attention_mask=...), or say record(pad_token_id="none") if every token counts, or '
            'record(read_from="logits") to find padding by what the loss trains on'
        )
    return [(0, ids.size)] if ids.size else []


def _packed(positions: Ints) -> bool:
    return bool((positions[1:] <= positions[:-1]).any())


def _runs(mask: Ints) -> list[tuple[int, int]]:
    """Return the column ranges of equal values other than 0."""
    change = np.flatnonzero(np.diff(mask)) + 1
    borders = [0, *change.tolist(), mask.size]
    return [(a, b) for a, b in pairwise(borders) if b > a and mask[a] != 0]


def _restarts(positions: Ints, row: int, column: int, masked: bool) -> list[int]:
    """Return the columns of the row at which another sample starts: where position ids do not go on by one.

    Args:
        positions: position ids of a run of tokens that starts at ``column``.
        masked: True if a mask tells padding.
    """
    cuts = np.flatnonzero(np.diff(positions) != 1) + 1
    odd = cuts[positions[cuts] != positions[0]]
    if odd.size:
        at = int(odd[0])
        raise CaptureError(f"""position_ids of row {row} go from {int(positions[at - 1])} to {int(positions[at])} at
        column {column + at}, which is neither the next position nor the start of a sample: name borders with
        record(cu_seq_lens=...), or other position ids with record(position_ids=...)""")
    single = cuts[:-1][np.diff(cuts) == 1]
    if not masked and single.size:
        raise CaptureError(f"""position_ids of row {row} restart at every token from column {column + int(single[0])}
        on, which may be padding or samples of one token: name an attention mask with record(attention_mask=...)""")
    return [column + int(cut) for cut in cuts]


def _split(start: int, stop: int, cuts: list[int]) -> Iterator[tuple[int, int]]:
    borders = [start, *cuts, stop]
    yield from pairwise(borders)


def predicted(layout: TokenLayout, first: Any = None) -> TokenLayout:
    """Return the layout of the tokens that hidden states predict: all but the first of each segment.

    Args:
        first: the first column whose hidden state is known; None for all of them.
    """
    segments = []
    for s in layout.segments:
        skip = max(1, 0 if first is None else int(first) + 1 - s.col)
        if s.stop - s.start > skip:
            segments.append(s._replace(start=s.start + skip, col=s.col + skip))
    return TokenLayout(layout.shape, tuple(segments))


def _short(values: Ints) -> str:
    found = values.reshape(-1).tolist()
    return str(found) if len(found) <= 8 else f"[{', '.join(map(str, found[:7]))}, ...]"
