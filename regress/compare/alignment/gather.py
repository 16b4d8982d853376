"""Canonical tensors, gathered from the tensors of all microbatches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from regress.compare.alignment.keys import Key
from regress.compare.quantities import Kind, Source, quantity_named
from regress.dump.arrays import Array, dtype_name
from regress.dump.record import Record
from regress.errors import CompareError
from regress.layout import TokenFrame, TokenLayout

Told = tuple[NDArray[np.bool_], NDArray[np.bool_]]
"""See `regress.compare.alignment.keys.told_loss_tokens`."""


@dataclass(frozen=True)
class Part:
    """A record and where its tokens lie; ``rows`` is the layout that rows of loss tokens follow."""

    key: Key
    record: Record
    layout: TokenLayout
    rows: TokenLayout


def gather(
    parts: Sequence[Part],
    source: Source,
    frame: TokenFrame,
    told: Told,
) -> Array:
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
    gather = _gather_hidden if kind is Kind.HIDDEN else _gather_tokens
    return gather(parts, arrays, source, frame, told)


def _gather_tokens(
    parts: Sequence[Part],
    arrays: Sequence[Array],
    source: Source,
    frame: TokenFrame,
    told: Told,
) -> Array:
    flat = np.zeros(frame.size, arrays[0].dtype)
    everywhere = quantity_named(source.quantity).kind is Kind.EXACT
    for part, array in zip(parts, arrays, strict=True):
        if array.shape != part.layout.shape:
            raise _wrong_shape(part, source, array)
        canonical, local = part.layout.indices(frame.offsets)
        if not everywhere and part.key.micro is not None:
            wanted = _loss_tokens(canonical, told)
            if wanted is None:
                raise _no_mask(part)
            canonical, local = canonical[wanted], local[wanted]
        flat[canonical] = array.reshape(-1)[local]
    return flat


def _gather_hidden(
    parts: Sequence[Part],
    arrays: Sequence[Array],
    source: Source,
    frame: TokenFrame,
    told: Told,
) -> Array:
    of_loss_tokens = [_has_rows(part, array, frame, told) for part, array in zip(parts, arrays, strict=True)]
    places: list[NDArray[np.int64]] = []
    values: list[Array] = []
    for part, array in zip(parts, arrays, strict=True):
        B, T = part.layout.shape
        if all(of_loss_tokens):
            canonical, _ = part.rows.indices(frame.offsets)
            places.append(canonical[told[1][canonical]])
            values.append(array.reshape(len(places[-1]), array.shape[-1]))
        elif array.shape[:2] == (B, T) or array.shape[:1] == (B * T,):
            inner = array.shape[2:] if array.shape[:2] == (B, T) else array.shape[1:]
            canonical, local = part.layout.indices(frame.offsets)
            places.append(canonical)
            values.append(array.reshape(B * T, *inner)[local])
        elif _loss_tokens(part.rows.indices(frame.offsets)[0], told) is None:
            raise _no_mask(part)
        elif not _has_rows(part, array, frame, told):
            raise _wrong_shape(part, source, array)
    if len({array.shape[1:] for array in values}) > 1:
        raise CompareError(
            f"{source.label} has several sizes over its microbatches; choose other modules to record"
        )
    if len(values) < len(parts):
        raise CompareError(
            f"{source.label} has rows of loss tokens in some microbatches and of all tokens in others; record one kind"
        )
    ordered: Array = np.concatenate(values)[np.argsort(np.concatenate(places), kind="stable")]
    return ordered


def _has_rows(part: Part, array: Array, frame: TokenFrame, told: Told) -> bool:
    """Return True if an array has one row for each loss token.

    A shape may match by chance in one microbatch, but not in all: nothing predicts a first token, so there are fewer
    rows than tokens.
    """
    wanted = _loss_tokens(part.rows.indices(frame.offsets)[0], told)
    return wanted is not None and array.shape[:-1] in ((1, int(wanted.sum())), (int(wanted.sum()),))


def _loss_tokens(canonical: NDArray[np.int64], told: Told) -> NDArray[np.bool_] | None:
    """Return which of these tokens of a microbatch enter the loss; None if no record tells."""
    if canonical.size and not told[0][canonical].any():
        return None
    wanted: NDArray[np.bool_] = told[1][canonical]
    return wanted


def _no_mask(part: Part) -> CompareError:
    return CompareError(
        f"{part.key} does not tell its loss tokens; record batch_inputs or forward_data beside it, with the tensor "
        "response_mask"
    )


def _wrong_shape(part: Part, source: Source, array: Array) -> CompareError:
    return CompareError(
        f"{source.tensor} in {part.key} has the shape {list(array.shape)}, which is neither that of its tokens "
        f"{list(part.layout.shape)} nor one row for each loss token"
    )
