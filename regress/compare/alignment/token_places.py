"""Tokens at the places of a record's local tensors, and what records tell of the tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from regress.compare.alignment.local_shard import local_shard
from regress.compare.alignment.record_keys import Key, key_of
from regress.compare.alignment.token_overlap import Index, Part, token_part
from regress.compare.alignment.token_spans import PADDING
from regress.compare.quantities import EVERYWHERE, MASKS, Kind, QuantitySource, quantity_named
from regress.dump.record import Record
from regress.errors import CompareError
from regress.layout import ShardLayout, TokenLayout

Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Places:
    """Tokens at the places of a record's ``[B, T]`` tensors.

    Attributes:
        grid: ``(B, T)``.
        tokens: ``[B * T]`` canonical token at each place, `PADDING` for none.
        order: canonical tokens in the order that rows of loss tokens follow.
    """

    grid: tuple[int, int]
    tokens: Index
    order: Index

    @classmethod
    def of(cls, layout: TokenLayout, rows: TokenLayout, offsets: Index) -> Places:
        """Return the places of a record with this layout; ``rows`` is the one that rows of loss tokens follow."""
        canonical, local = layout.indices(offsets)
        tokens = np.full(layout.shape[0] * layout.shape[1], PADDING, np.int64)
        tokens[local] = canonical
        return cls(layout.shape, tokens, canonical if rows is layout else rows.indices(offsets)[0])

    @cached_property
    def canonical(self) -> Index:
        """Canonical tokens that lie here, place by place."""
        return self.tokens[self.tokens >= 0]

    def alike(self, other: Places) -> bool:
        """Return True if the same tokens lie at the same places."""
        pairs = ((self.tokens, other.tokens), (self.order, other.order))
        return self.grid == other.grid and all(np.array_equal(*pair) for pair in pairs)

    def loss_rows(self, loss: Mask) -> Index:
        """Return the canonical token of each row of loss tokens."""
        return self.order[loss[self.order]]

    def lead(self, shape: tuple[int, ...]) -> tuple[Index, int] | None:
        """Return the token at each place of a tensor ``[B, T, ...]`` or ``[B * T, ...]``, and 2 or 1; else None."""
        known = ((2, self.grid), (1, self.tokens.shape))
        return next(((self.tokens, lead) for lead, places in known if shape[:lead] == places), None)

    def by_loss(self, shape: tuple[int, ...], loss: Mask) -> bool:
        """Return True if a tensor of this shape may have one row for each loss token."""
        count = int(np.count_nonzero(loss[self.order]))
        return len(shape) > 1 and shape[:-1] in ((1, count), (count,))

    def rows(
        self, shape: tuple[int, ...], loss: Mask | None, *, rows_only: bool, name: tuple[str, Key]
    ) -> tuple[Index, int]:
        """Return the token of each row of a whole tensor, and how many of its dimensions are places.

        Args:
            loss: ``[frame.size]``; None where nothing tells it.
            rows_only: True if the tensor is known to have rows of loss tokens only.
            name: the tensor, and the place of its record.

        Raises:
            CompareError: if the shape is neither that of the places nor one row for each loss token.
        """
        found = None if rows_only else self.lead(shape)
        if found is not None:
            return found
        if loss is not None and self.by_loss(shape, loss):
            return self.loss_rows(loss), len(shape) - 1
        raise CompareError(f"""{name[0]} in {name[1]} has the shape {list(shape)}, which is neither that of its tokens
        {list(self.grid)} nor one row for each loss token""")


@dataclass(frozen=True, eq=False)
class Placed:
    """A tensor as rows of tokens.

    Attributes:
        layout: the part of the microbatch's whole tensor that it is.
        tokens: canonical token of each row of that.
        columns: columns of the batch; None where rows are those of loss tokens over the vocabulary.
        by_loss: True if the rows are those of loss tokens.
    """

    part: Part
    layout: ShardLayout
    tokens: Index
    by_loss: bool
    columns: int | None


def placed(
    record: Record, source: QuantitySource, places: Places, loss: Mask | None, *, rows_only: bool = False
) -> Placed:
    """Return a tensor of a record as rows of tokens, by its shape.

    Args:
        rows_only: True if it is known to have rows of loss tokens only; its metadata may tell that, too.

    Raises:
        CompareError: if its shape or its shard layout is unusable.
    """
    rows_only = rows_only or isinstance(record.meta.get(source.tensor), str)  # `LOSS_ROWS`
    shard = local_shard(key_of(record), record, source.tensor)
    name = source.tensor, shard.key
    tokens, lead = places.rows(shard.layout.shape, loss, rows_only=rows_only, name=name)
    by_loss, part = tokens is not places.tokens, token_part(shard.array, shard.layout, tokens, lead)
    logits = source.tensor.endswith("lm_head") or source.quantity == "logit_gradient"
    return Placed(part, shard.layout, tokens, by_loss, None if logits and by_loss else places.grid[1])


class RecordedTokens(NamedTuple):
    """Token ids and loss tokens of a frame, as records tell them.

    Attributes:
        ids: ``[frame.size]`` token ids, or None.
        loss: ``[frame.size]`` loss tokens, or None; ``known`` where a record tells it.
    """

    ids: Index | None
    loss: Mask | None
    known: Mask


def recorded_tokens(records: Iterable[tuple[Record, Places]], size: int) -> RecordedTokens:
    """Read token ids and loss tokens from records; the first that tells of a token whether it is in the loss counts."""
    ids = np.zeros(size, np.int64)
    loss, known = np.zeros(size, bool), np.zeros(size, bool)
    any_ids = False
    for record, places in records:
        here = np.flatnonzero(places.tokens >= 0)
        tokens = places.tokens[here]
        values = record.tensors.get("input_ids")
        if values is not None and values.size == places.tokens.size:
            with np.errstate(invalid="ignore"):  # NaN is not an id
                ids[tokens] = values.reshape(-1)[here]
            any_ids = True
        mask = record.tensors.get(MASKS.get(record.type, ""))
        if mask is not None and mask.size == places.tokens.size:
            new = ~known[tokens]
            loss[tokens[new]] = mask.reshape(-1)[here[new]].astype(bool)
            known[tokens] = True
    return RecordedTokens(ids if any_ids else None, loss if known.any() else None, known)


def selected_rows(source: QuantitySource, rows: Index, loss: Mask | None) -> Index:
    """Return the local rows whose values count."""
    here = rows >= 0
    inside = quantity_named(source.quantity).kind is Kind.TOKEN and source.quantity not in EVERYWHERE
    if inside and loss is not None:
        here &= loss[np.maximum(rows, 0)]
    return np.flatnonzero(here)
