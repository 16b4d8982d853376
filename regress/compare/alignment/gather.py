"""Canonical tensors, gathered from the rows of tokens of several records."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from regress.compare.alignment.keys import Key, key_of
from regress.compare.alignment.local_shard import local_shard
from regress.compare.alignment.places import Mask, Placed, Places, Told, placed
from regress.compare.quantities import Kind, Source, quantity_named
from regress.dump.arrays import Array, dtype_name
from regress.dump.record import Record
from regress.errors import CompareError
from regress.layout import TokenFrame


@dataclass(frozen=True)
class Part:
    """A record and the tokens at its places."""

    key: Key
    record: Record
    places: Places


def gather(parts: Sequence[Part], source: Source, frame: TokenFrame, told: Told) -> Array:
    """Return the canonical values of a tensor that all parts hold.

    Raises:
        CompareError: if it has several dtypes or sizes, a shape that is not of its tokens, or loss tokens are unknown.
    """
    arrays = [part.record.tensors[source.tensor] for part in parts]
    if len({array.dtype for array in arrays}) > 1:
        names = ", ".join(sorted({dtype_name(array.dtype) for array in arrays}))
        raise CompareError(
            f"{source.label} has several dtypes over its microbatches ({names}); record it in one"
        )
    kind = quantity_named(source.quantity).kind
    if kind is Kind.SHARE:
        return np.array(math.fsum(float(array) for array in arrays), arrays[0].dtype)
    inside = kind is Kind.TOKEN and parts[0].key.micro is not None
    rows_only = of_loss_tokens([(part.record, part.places) for part in parts], source, told.loss)
    found = [_placed(part, source, told, inside, rows_only) for part in parts]
    whole = gathered(found, source.label, frame.size, told.loss)
    if inside and told.loss is not None:
        whole[~told.loss] = 0
    return whole


def of_loss_tokens(records: Iterable[tuple[Record, Places]], source: Source, loss: Mask | None) -> bool:
    """Return True if a tensor has one row for each loss token.

    A shape may match by chance in one microbatch, but not in all: nothing predicts a first token, so there are fewer
    rows than tokens.
    """
    if loss is None or quantity_named(source.quantity).kind is not Kind.HIDDEN:
        return False
    shapes = ((local_shard(key_of(r), r, source.tensor).layout.shape, places) for r, places in records)
    return all(places.by_loss(shape, loss) for shape, places in shapes)


def _placed(part: Part, source: Source, told: Told, inside: bool, rows_only: bool) -> Placed:
    tokens = part.places.canonical
    unknown = bool(tokens.size) and not told.known[tokens].any()
    try:
        found = placed(part.record, source, part.places, None if unknown else told.loss, rows_only=rows_only)
    except CompareError:
        if unknown:
            raise _no_mask(part) from None
        raise
    if inside and unknown:
        raise _no_mask(part)
    return found


def gathered(parts: Sequence[Placed], label: str, size: int, loss: Mask | None) -> Array:
    """Return the values of all tokens ``[size, ...]``, or of the loss tokens ``[K, ...]``, in canonical order.

    Of a token that lies in several parts the first counts; the values of absent ones are 0.

    Args:
        label: name of the tensor.

    Raises:
        CompareError: if the parts have rows of several sizes, or of loss tokens and of all tokens.
    """
    inner = parts[0].part.inner.shape
    if any(one.part.inner.shape != inner for one in parts):
        raise CompareError(f"{label} has several sizes over its microbatches; choose other modules to record")
    kinds = {one.by_loss for one in parts if one.tokens.size}
    if len(kinds) > 1:
        raise CompareError(
            f"{label} has rows of loss tokens in some microbatches and of all tokens in others; record one kind"
        )
    number = np.cumsum(loss) - 1 if loss is not None and kinds == {True} else np.arange(size)
    whole = np.zeros((int(number.max(initial=-1)) + 1, *inner), parts[0].part.array.dtype)
    for one in reversed(parts):
        here = np.flatnonzero(one.part.rows >= 0)
        whole[np.ix_(number[one.part.rows[here]], *one.part.inner.along())] = one.part.array[here]
    return whole


def _no_mask(part: Part) -> CompareError:
    return CompareError(
        f"{part.key} does not tell its loss tokens; record batch_inputs or forward_data beside it, with the tensor "
        "response_mask"
    )
