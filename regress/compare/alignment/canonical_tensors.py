"""Canonical tensors of an update, put together from those of all ranks and microbatches, free of any layout."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from regress.compare.alignment.local_shard import local_shard
from regress.compare.alignment.record_keys import Key, key_of
from regress.compare.alignment.shard_overlap import assembled, two_values
from regress.compare.alignment.token_places import (
    Mask,
    Placed,
    Places,
    RecordedTokens,
    placed,
    recorded_tokens,
)
from regress.compare.coverage import judge_coverage
from regress.compare.quantities import (
    MASKS,
    MICRO_TYPES,
    QUANTITIES,
    STEP_TYPES,
    UPDATE_TYPES,
    Kind,
    QuantitySource,
    quantity_named,
    source_of,
)
from regress.compare.record_plan import Plan
from regress.compare.update_records import Records, tokens_of
from regress.dump.coordinates import Place
from regress.dump.numpy_arrays import Array, dtype_name
from regress.dump.record import Record
from regress.errors import CompareError
from regress.layout import TokenFrame

Canonical = dict[str, dict[str, Array]]
"""``quantity -> tensor name -> canonical values``."""


def canonicalize(records: Iterable[Record], frame: TokenFrame, plan: Plan | None = None) -> Canonical:
    """Gather the records of one optimizer update.

    Token quantities become flat ``[frame.size]`` arrays, 0 where there is no loss token; hidden states become
    ``[frame.size, ...]``; logits ``[K, V]``, the loss tokens in canonical order. Shares of a loss are summed.
    Gradients, parameters and optimizer states are put together from their shards.

    Args:
        plan: which ranks repeat each other's tokens; by default none does.

    Raises:
        CompareError: if a token is missing or was produced twice, ranks disagree, a tensor is unknown, missing in a
            microbatch or of another shape than its layout says, or an element of it is on no rank.
    """
    index = Records.of(records, frame)
    known = index.one_each()
    result = _whole_tensors(known)
    record_types = _microbatches(index, known, plan or Plan(()))
    telling = (part for record_type in MASKS for part in record_types.get(record_type, ()))
    recorded = recorded_tokens(((part.record, part.places) for part in telling), frame.size)
    for record_type, parts in record_types.items():
        _prove_coverage(record_type, parts, frame, recorded)
    for record_type in (*MICRO_TYPES, *STEP_TYPES):
        for source in _sources(record_types.get(record_type, [])):
            tensors = result.setdefault(source.quantity, {})
            if source.name not in tensors or source.primary:
                tensors[source.name] = gather(record_types[record_type], source, frame, recorded)
    return {q.name: result[q.name] for q in QUANTITIES if q.name in result}


def _whole_tensors(placed: Mapping[Key, Record]) -> Canonical:
    """Put full tensors together from their shards; elements that several ranks hold must be equal."""
    result: Canonical = {}
    for record_type in UPDATE_TYPES:
        keys = sorted(
            (key for key in placed if key.record_type == record_type), key=lambda key: key.rank or 0
        )
        if keys:
            result[record_type] = _assembled({key: placed[key] for key in keys})
        if record_type == "gradient":
            norms = {key: placed[key].meta["grad_norm"] for key in keys if "grad_norm" in placed[key].meta}
            for key, norm in norms.items():
                if norm != (first := next(iter(norms.values()))):
                    raise two_values("grad_norm", key)
                result["grad_norm"] = {"grad_norm": np.array(first, np.float64)}
    return result


def _microbatches(index: Records, placed: Mapping[Key, Record], plan: Plan) -> dict[str, list[Part]]:
    """Return the records of tokens by type; those of ranks that repeat each other are merged."""
    groups: dict[tuple[str, int, int | None], list[Part]] = {}
    for key, record in placed.items():
        if key.record_type in (*MICRO_TYPES, *STEP_TYPES):
            if key in index.misfits:
                raise CompareError(index.misfits[key])
            part = Part(key, record, index.places(key))
            groups.setdefault((key.record_type, plan.root(key.rank), key.micro), []).append(part)
    record_types: dict[str, list[Part]] = {}
    for (record_type, *_), parts in groups.items():
        record_types.setdefault(record_type, []).append(_merged(parts))
    return record_types


def _merged(parts: Sequence[Part]) -> Part:
    """Return the records of ranks that hold the same tokens, merged as if one rank had recorded them."""
    first, *rest = sorted(parts, key=lambda part: part.key.rank or 0)
    for part in rest:
        if not part.places.alike(first.places):
            raise CompareError(
                f"the tokens of {part.key} do not lie as those of rank {first.key.rank}, which it repeats"
            )
    if not rest and not first.record.meta.get("shards"):
        return first
    tensors = _assembled({part.key: part.record for part in (first, *rest)})
    meta = {name: value for name, value in first.record.meta.items() if name != "shards"}
    return replace(first, record=replace(first.record, tensors=tensors, meta=meta))


def _assembled(records: Mapping[Key, Record]) -> dict[str, Array]:
    """Return every tensor that any of the records holds, put together whole."""
    names = dict.fromkeys(name for record in records.values() for name in record.tensors)
    return {
        name: assembled(
            [local_shard(key, record, name) for key, record in records.items() if name in record.tensors],
            name,
        )
        for name in names
    }


def _prove_coverage(
    record_type: str, parts: Sequence[Part], frame: TokenFrame, recorded: RecordedTokens
) -> None:
    found = {part.key: part.places.canonical for part in parts}
    expected = tokens_of(record_type, frame, recorded.loss)
    verdict = judge_coverage(record_type, found, frame, Place(parts[0].record.step), expected=expected)
    if not verdict.ok:
        raise CompareError(f"{record_type} cannot be brought into canonical form: {verdict.detail}")


def _sources(parts: Sequence[Part]) -> list[QuantitySource]:
    """Return the tensors of a type, in recorded order; each must be in all of its records."""
    names = list(dict.fromkeys(name for part in parts for name in part.record.tensors))
    found = []
    for name in names:
        for part in parts:
            if name not in part.record.tensors:
                raise CompareError(f"{part.key} lacks {name}, which other microbatches have")
        source = source_of(parts[0].key.record_type, name)
        if source is None:
            raise CompareError(f"""{parts[0].key.record_type} holds a tensor {name!r} that belongs to no quantity; leave
            it out of the tap""")
        found.append(source)
    return found


@dataclass(frozen=True)
class Part:
    """A record and the tokens at its places."""

    key: Key
    record: Record
    places: Places


def gather(
    parts: Sequence[Part], source: QuantitySource, frame: TokenFrame, recorded: RecordedTokens
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
    inside = kind is Kind.TOKEN and parts[0].key.micro is not None
    rows_only = of_loss_tokens([(part.record, part.places) for part in parts], source, recorded.loss)
    found = [_placed(part, source, recorded, inside, rows_only) for part in parts]
    whole = gathered(found, source.label, frame.size, recorded.loss)
    if inside and recorded.loss is not None:
        whole[~recorded.loss] = 0
    return whole


def of_loss_tokens(
    records: Iterable[tuple[Record, Places]], source: QuantitySource, loss: Mask | None
) -> bool:
    """Return True if a tensor has one row for each loss token.

    A shape may match by chance in one microbatch, but not in all: nothing predicts a first token, so there are fewer
    rows than tokens.
    """
    if loss is None or quantity_named(source.quantity).kind is not Kind.HIDDEN:
        return False
    shapes = ((local_shard(key_of(r), r, source.tensor).layout.shape, places) for r, places in records)
    return all(places.by_loss(shape, loss) for shape, places in shapes)


def _placed(
    part: Part, source: QuantitySource, recorded: RecordedTokens, inside: bool, rows_only: bool
) -> Placed:
    tokens = part.places.canonical
    unknown = bool(tokens.size) and not recorded.known[tokens].any()
    try:
        found = placed(
            part.record, source, part.places, None if unknown else recorded.loss, rows_only=rows_only
        )
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
    return CompareError(f"""{part.key} does not tell its loss tokens; record batch_inputs or forward_data beside it,
    with the tensor response_mask""")
