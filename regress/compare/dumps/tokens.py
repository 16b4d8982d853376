"""Tensors of tokens of a record: the token of each row, and the rows that count."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from regress.compare.alignment.keys import key_of
from regress.compare.alignment.local_shard import local_shard
from regress.compare.alignment.locate import Locator
from regress.compare.alignment.spans import Spans
from regress.compare.dumps.listing import listed
from regress.compare.dumps.sides import Side
from regress.compare.dumps.token_overlap import Index, Part, token_part
from regress.compare.quantities import (
    EVERYWHERE,
    MASKS,
    Kind,
    Source,
    quantity_named,
)
from regress.compare.verdicts.case import Locate
from regress.dump.record import Record
from regress.errors import CompareError
from regress.layout import SampleKey, TokenFrame

Mask = NDArray[np.bool_]


def told_tokens(
    side: Side, names: Iterable[str], index: Mapping[SampleKey, int], frame: TokenFrame
) -> tuple[Index | None, Mask | None]:
    """Return token ids and loss tokens, both ``[frame.size]``, as far as records tell them."""
    ids = np.zeros(frame.size, np.int64)
    loss, told = np.zeros(frame.size, bool), np.zeros(frame.size, bool)
    known = False
    for name in names:
        record = side.read(name)
        header = listed(name, record)
        if header.spans is None:
            continue
        canonical = header.spans.canonical(index, frame.offsets)
        here = np.flatnonzero(canonical >= 0)
        tokens = canonical[here]
        values = record.tensors.get("input_ids")
        if values is not None and values.size == canonical.size:
            with np.errstate(invalid="ignore"):  # of NaN, which is no id
                ids[tokens] = values.reshape(-1)[here]
            known = True
        mask = record.tensors.get(MASKS.get(record.type, ""))
        if mask is not None and mask.size == canonical.size:
            new = ~told[tokens]
            loss[tokens[new]] = mask.reshape(-1)[here[new]].astype(bool)
            told[tokens] = True
    return (ids if known else None), (loss if told.any() else None)


def tokens_of(
    record: Record,
    source: Source,
    index: Mapping[SampleKey, int],
    frame: TokenFrame,
    loss: Mask | None,
) -> tuple[Part, int]:
    """Return a tensor as a part indexed by tokens, and how many of its dimensions are places."""
    header = listed(source.tensor, record)
    if header.spans is None or header.rows is None:
        raise CompareError(header.problem)
    array, layout = record.tensors[source.tensor], local_shard(key_of(record), record, source.tensor).layout
    canonical = header.spans.canonical(index, frame.offsets)
    shape, grid = layout.shape, header.spans.shape
    rows_only = isinstance(record.meta.get(source.tensor), str)  # "rows of the loss tokens, in order"
    if not rows_only and shape[:2] == grid:
        return token_part(array, layout, canonical, 2), 2
    if not rows_only and shape[:1] == canonical.shape:
        return token_part(array, layout, canonical, 1), 1
    tokens = header.rows.canonical(index, frame.offsets)
    if loss is not None and len(shape) > 1:
        order = _in_segments(header.rows, tokens)
        kept = order[loss[order]]
        if shape[:-1] in ((1, kept.size), (kept.size,)):
            return token_part(array, layout, kept, len(shape) - 1), len(shape) - 1
    raise CompareError(
        f"{source.tensor} has the shape {list(shape)}, which is neither that of its tokens {list(grid)} nor one row "
        "for each loss token"
    )


def _in_segments(spans: Spans, canonical: Index) -> Index:
    """Return the tokens in the order of the segments, which rows of loss tokens follow."""
    columns = spans.shape[1]
    runs = [
        canonical[row * columns + col : row * columns + col + stop - start]
        for _, start, stop, row, col in spans.segments
    ]
    found = np.concatenate([np.zeros(0, np.int64), *runs])
    return found[found >= 0]


def selected_rows(source: Source, part: Part, loss: Mask | None) -> Index:
    """Return the local rows whose values count."""
    here = part.rows >= 0
    everywhere = source.quantity in EVERYWHERE
    if quantity_named(source.quantity).kind is Kind.TOKEN and loss is not None and not everywhere:
        here &= loss[np.maximum(part.rows, 0)]
    return np.flatnonzero(here)


def token_words(locator: Locator, part: Part) -> Locate:
    """Return words for the elements of a tensor of tokens."""
    width = max(part.width, 1)

    def words(index: int) -> str:
        row, within = divmod(index, width)
        token = int(part.rows[row])
        if token < 0:
            return f"place {row} (padding)"
        where = locator.token(token)
        if part.inner.shape in ((), (1,)):
            return where
        local = np.unravel_index(within, part.inner.local_shape)
        place = [int(known[i]) for known, i in zip(part.inner.along(), local, strict=True)]
        return f"{where}, element {place}"

    return words
