"""From local tensors to canonical ones: what all ranks and microbatches computed, free of any layout."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from regress.compare.align import Key, by_place, canonical_layout
from regress.compare.coverage import judge_coverage
from regress.compare.quantities import (
    MICRO_STAGES,
    OPEN_STAGES,
    QUANTITIES,
    STEP_STAGES,
    UPDATE_STAGES,
    Kind,
    Source,
    quantity_named,
    source_of,
)
from regress.compare.verdict import Place
from regress.dump.arrays import Array, dtype_name, raw
from regress.dump.record import Record
from regress.errors import CompareError
from regress.layout import TokenFrame, TokenLayout

Canonical = dict[str, dict[str, Array]]
"""``quantity -> tensor name -> canonical values``."""

Masks = dict[tuple[int | None, int | None], NDArray[np.bool_]]
"""``[B, T]`` of the loss tokens, by rank and microbatch."""

MASKS = {"batch_inputs": "response_mask", "forward_data": "response_mask", "is_loss_debug": "effective_valid"}
"""The tensor of each stage that tells the loss tokens."""


@dataclass(frozen=True)
class Part:
    """A record and where its tokens lie."""

    key: Key
    record: Record
    layout: TokenLayout


def canonicalize(records: Iterable[Record], frame: TokenFrame) -> Canonical:
    """Gather the records of one optimizer update.

    Token quantities become flat ``[frame.size]`` arrays, 0 where there is no loss token; hidden states
    ``[frame.size, ...]``; logits ``[K, V]``, the loss tokens in canonical order; shares of a loss their sum; gradients,
    parameters and optimizer states stay as they are.

    Raises:
        CompareError: if a token is missing or was produced twice, ranks disagree, or a tensor is unknown, missing in
            a microbatch or of another shape than its layout says.
    """
    placed = by_place(records)
    for key, found in placed.items():
        if len(found) > 1:
            raise CompareError(
                f"{key} was recorded {len(found)} times, so it has no one value; keep one record"
            )
    stages: dict[str, list[Part]] = {}
    result: Canonical = {}
    for key, (record,) in placed.items():
        if key.stage in (*MICRO_STAGES, *STEP_STAGES):
            stages.setdefault(key.stage, []).append(Part(key, record, canonical_layout(record, frame)))
        elif key.stage in UPDATE_STAGES:
            _add_whole(result, record, key)
    for stage, parts in stages.items():
        _prove_coverage(stage, parts, frame)
    masks = loss_masks(parts for found in stages.values() for parts in found)
    for stage in (*MICRO_STAGES, *STEP_STAGES):
        for source in _sources(stages.get(stage, [])):
            tensors = result.setdefault(source.quantity, {})
            if source.name not in tensors or source.primary:
                tensors[source.name] = _gather(stages[stage], source, frame, masks)
    return {q.name: result[q.name] for q in QUANTITIES if q.name in result}


def loss_masks(parts: Iterable[Part]) -> Masks:
    """``[B, T]`` of the loss tokens of each rank and microbatch, from whichever record tells them."""
    found: Masks = {}
    for part in parts:
        mask = part.record.tensors.get(MASKS.get(part.key.stage, ""))
        if mask is not None and mask.shape == part.layout.shape:
            found.setdefault((part.key.rank, part.key.micro), mask.astype(bool))
    return found


def _prove_coverage(stage: str, parts: Sequence[Part], frame: TokenFrame) -> None:
    verdict = judge_coverage(
        stage, {part.key: part.layout for part in parts}, frame, Place(parts[0].record.step)
    )
    if not verdict.ok:
        raise CompareError(f"{stage} cannot be brought into canonical form: {verdict.detail}")


def _sources(parts: Sequence[Part]) -> list[Source]:
    """The tensors of a stage, in recorded order; each must be in all of its records."""
    names = list(dict.fromkeys(name for part in parts for name in part.record.tensors))
    found = []
    for name in names:
        for part in parts:
            if name not in part.record.tensors:
                raise CompareError(f"{part.key} lacks {name}, which other microbatches have")
        source = source_of(parts[0].key.stage, name)
        if source is None:
            raise CompareError(
                f"{parts[0].key.stage} holds a tensor {name!r} that belongs to no quantity; leave it out of the tap"
            )
        found.append(source)
    return found


def _gather(
    parts: Sequence[Part],
    source: Source,
    frame: TokenFrame,
    masks: Masks,
) -> Array:
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
    return gather(parts, arrays, source, frame, masks)


def _gather_tokens(
    parts: Sequence[Part],
    arrays: Sequence[Array],
    source: Source,
    frame: TokenFrame,
    masks: Masks,
) -> Array:
    flat = np.zeros(frame.size, arrays[0].dtype)
    everywhere = quantity_named(source.quantity).kind is Kind.EXACT
    for part, array in zip(parts, arrays, strict=True):
        if array.shape != part.layout.shape:
            raise _wrong_shape(part, source, array)
        canonical, local = part.layout.indices(frame.offsets)
        if not everywhere and part.key.micro is not None:
            mask = masks.get((part.key.rank, part.key.micro))
            if mask is None:
                raise _no_mask(part)
            wanted = mask.reshape(-1)[local]
            canonical, local = canonical[wanted], local[wanted]
        flat[canonical] = array.reshape(-1)[local]
    return flat


def _gather_hidden(
    parts: Sequence[Part],
    arrays: Sequence[Array],
    source: Source,
    frame: TokenFrame,
    masks: Masks,
) -> Array:
    rows: list[NDArray[np.int64]] = []
    values: list[Array] = []
    for part, array in zip(parts, arrays, strict=True):
        canonical, local = part.layout.indices(frame.offsets)
        B, T = part.layout.shape
        mask = masks.get((part.key.rank, part.key.micro))
        wanted = None if mask is None else mask.reshape(-1)[local]
        # fewer rows than tokens, since nothing predicts a first token: the two forms cannot be confused
        if wanted is not None and array.shape[:-1] in ((1, int(wanted.sum())), (int(wanted.sum()),)):
            rows.append(canonical[wanted])
            values.append(array.reshape(len(rows[-1]), array.shape[-1]))
        elif array.shape[:2] == (B, T) or array.shape[:1] == (B * T,):
            inner = array.shape[2:] if array.shape[:2] == (B, T) else array.shape[1:]
            rows.append(canonical)
            values.append(array.reshape(B * T, *inner)[local])
        elif wanted is None:
            raise _no_mask(part)
        else:
            raise _wrong_shape(part, source, array)
    if len({array.shape[1:] for array in values}) > 1:
        raise CompareError(
            f"{source.label} has several sizes over its microbatches; choose other modules to record"
        )
    where = np.concatenate(rows)
    ordered: Array = np.concatenate(values)[np.argsort(where, kind="stable")]
    return ordered


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


def _add_whole(result: Canonical, record: Record, key: Key) -> None:
    """Full tensors; a further rank may only repeat them."""
    assert key.stage in OPEN_STAGES
    known = result.setdefault(key.stage, {})
    for name, array in record.tensors.items():
        if name in known and (known[name].dtype != array.dtype or raw(known[name]) != raw(array)):
            raise CompareError(f"{name} in {key} differs from that of another rank, so it has no one value")
        known[name] = array
    if key.stage == "gradient" and "grad_norm" in record.meta:
        norm = np.array(record.meta["grad_norm"], np.float64)
        result.setdefault("grad_norm", {})["grad_norm"] = norm
