"""From local tensors to canonical ones: what all ranks and microbatches computed, free of any layout."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from regress.compare.align import Key, by_place, canonical_layout, rows_layout, told_loss_tokens
from regress.compare.coverage import judge_coverage
from regress.compare.held import assembled, held, two_values
from regress.compare.placed import tokens_of
from regress.compare.plan import Plan
from regress.compare.quantities import (
    MICRO_STAGES,
    QUANTITIES,
    STEP_STAGES,
    UPDATE_STAGES,
    Kind,
    Source,
    quantity_named,
    source_of,
)
from regress.compare.verdict import Place
from regress.dump.arrays import Array, dtype_name
from regress.dump.record import Record
from regress.errors import CompareError
from regress.layout import TokenFrame, TokenLayout

Canonical = dict[str, dict[str, Array]]
"""``quantity -> tensor name -> canonical values``."""

Told = tuple[NDArray[np.bool_], NDArray[np.bool_]]
"""See `regress.compare.align.told_loss_tokens`."""


@dataclass(frozen=True)
class Part:
    """A record and where its tokens lie; ``rows`` is the layout that rows of loss tokens follow."""

    key: Key
    record: Record
    layout: TokenLayout
    rows: TokenLayout


def canonicalize(records: Iterable[Record], frame: TokenFrame, plan: Plan | None = None) -> Canonical:
    """Gather the records of one optimizer update.

    Token quantities become flat ``[frame.size]`` arrays, 0 where there is no loss token; hidden states
    ``[frame.size, ...]``; logits ``[K, V]``, the loss tokens in canonical order; shares of a loss their sum; gradients,
    parameters and optimizer states, put together from their shards, are whole.

    Args:
        plan: which ranks repeat each other's tokens; by default none does.

    Raises:
        CompareError: if a token is missing or was produced twice, ranks disagree, a tensor is unknown, missing in a
            microbatch or of another shape than its layout says, or an element of it is on no rank.
    """
    placed = _one_each(records)
    result = _whole_tensors(placed)
    stages = _microbatches(placed, frame, plan or Plan(()))
    told = told_loss_tokens(
        ((part.record, part.layout) for parts in stages.values() for part in parts), frame
    )
    for stage, parts in stages.items():
        _prove_coverage(stage, parts, frame, told)
    for stage in (*MICRO_STAGES, *STEP_STAGES):
        for source in _sources(stages.get(stage, [])):
            tensors = result.setdefault(source.quantity, {})
            if source.name not in tensors or source.primary:
                tensors[source.name] = _gather(stages[stage], source, frame, told)
    return {q.name: result[q.name] for q in QUANTITIES if q.name in result}


def _one_each(records: Iterable[Record]) -> dict[Key, Record]:
    """The record of each place."""
    placed = by_place(records)
    for key, found in placed.items():
        if len(found) > 1:
            raise CompareError(
                f"{key} was recorded {len(found)} times, so it has no one value; keep one record"
            )
    return {key: record for key, (record,) in placed.items()}


def _whole_tensors(placed: Mapping[Key, Record]) -> Canonical:
    """Full tensors: shards are put together, and what several ranks hold they may only repeat."""
    result: Canonical = {}
    for stage in UPDATE_STAGES:
        keys = sorted((key for key in placed if key.stage == stage), key=lambda key: key.rank or 0)
        if keys:
            result[stage] = _assembled({key: placed[key] for key in keys})
        if stage == "gradient":
            norms = {key: placed[key].meta["grad_norm"] for key in keys if "grad_norm" in placed[key].meta}
            for key, norm in norms.items():
                if norm != (first := next(iter(norms.values()))):
                    raise two_values("grad_norm", key)
                result["grad_norm"] = {"grad_norm": np.array(first, np.float64)}
    return result


def _microbatches(placed: Mapping[Key, Record], frame: TokenFrame, plan: Plan) -> dict[str, list[Part]]:
    """The records of tokens by stage, those of ranks that repeat each other as one."""
    groups: dict[tuple[str, int, int | None], list[Part]] = {}
    for key, record in placed.items():
        if key.stage in (*MICRO_STAGES, *STEP_STAGES):
            layout = canonical_layout(record, frame)
            part = Part(key, record, layout, rows_layout(record, frame) or layout)
            groups.setdefault((key.stage, plan.root(key.rank), key.micro), []).append(part)
    stages: dict[str, list[Part]] = {}
    for (stage, *_), parts in groups.items():
        stages.setdefault(stage, []).append(_merged(parts))
    return stages


def _merged(parts: Sequence[Part]) -> Part:
    """What ranks that hold the same tokens recorded, as if one had."""
    first, *rest = sorted(parts, key=lambda part: part.key.rank or 0)
    for part in rest:
        if (part.layout, part.rows) != (first.layout, first.rows):
            raise CompareError(
                f"the tokens of {part.key} do not lie as those of rank {first.key.rank}, which it repeats"
            )
    if not rest and not first.record.meta.get("shards"):
        return first
    tensors = _assembled({part.key: part.record for part in (first, *rest)})
    return replace(first, record=replace(first.record, tensors=tensors))


def _assembled(records: Mapping[Key, Record]) -> dict[str, Array]:
    """Every tensor that any of the records holds, whole."""
    names = dict.fromkeys(name for record in records.values() for name in record.tensors)
    return {
        name: assembled(
            [held(key, record, name) for key, record in records.items() if name in record.tensors], name
        )
        for name in names
    }


def _prove_coverage(stage: str, parts: Sequence[Part], frame: TokenFrame, told: Told) -> None:
    layouts = {part.key: part.layout for part in parts}
    wanted = tokens_of(stage, frame, told[1] if told[0].any() else None)
    verdict = judge_coverage(stage, layouts, frame, Place(parts[0].record.step), wanted=wanted)
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
    told: Told,
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
    """Whether an array has one row for each loss token.

    It may look so in one microbatch by chance, but not in all of them: nothing predicts a first token, so there are
    fewer rows than tokens.
    """
    wanted = _loss_tokens(part.rows.indices(frame.offsets)[0], told)
    return wanted is not None and array.shape[:-1] in ((1, int(wanted.sum())), (int(wanted.sum()),))


def _loss_tokens(canonical: NDArray[np.int64], told: Told) -> NDArray[np.bool_] | None:
    """Which of these tokens of a microbatch enter the loss; None if no record tells."""
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
