"""Canonical golden values of one update from any dump; each is read when it is first asked for.

Only failing tensors are asked for. A dump whose tensors are too large for it yields nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from regress.compare.alignment.canonical_projection import Projection
from regress.compare.alignment.canonical_tensors import gathered, of_loss_tokens
from regress.compare.alignment.local_shard import local_shard
from regress.compare.alignment.record_keys import key_of
from regress.compare.alignment.token_places import Mask, placed
from regress.compare.diagnosis.related_values import RelatedValues
from regress.compare.dumps.adamw_settings import Adam
from regress.compare.dumps.opened_dump import Named, Side, kept_with_source, open_side
from regress.compare.dumps.record_listing import headers
from regress.compare.dumps.sample_contents import rollouts_of
from regress.compare.dumps.truth_source import Tensors, TruthSide
from regress.compare.quantities import (
    EVERYWHERE,
    MICRO_TYPES,
    UPDATE_TYPES,
    Kind,
    QuantitySource,
    quantity_named,
    source_of,
)
from regress.compare.record_header import Header, lengths_of
from regress.dump.coordinates import Coordinates, Place
from regress.dump.mapped_arrays import release
from regress.dump.numpy_arrays import Array
from regress.errors import CompareError
from regress.layout import SampleKey, TokenFrame

LIMIT = 1 << 22
"""Most elements of a tensor that is put together."""


def golden_update(golden: Named, actual: Named, record: str) -> Projection:
    """Return the update that a golden record belongs to, able to project its values onto layouts.

    Args:
        golden, actual: the two sources.
        record: name of a golden record.
    """
    return golden_at(golden, actual, open_side(golden).entries[record][1].of_update)


def earlier_updates(golden: Named, actual: Named, record: str) -> Iterator[Projection]:
    """Yield the updates before the one that a golden record belongs to, in order."""
    entries = open_side(golden).entries
    own = entries[record][1]
    places = {where.of_update for type, where in entries.values() if type in MICRO_TYPES}
    yield from (golden_at(golden, actual, place) for place in sorted(places) if place < own.of_update)


def golden_at(golden: Named, actual: Named, place: Place) -> Projection:
    """Return the golden values of one update of two sources, able to be projected onto layouts."""
    return _beside(actual, golden, place)


@kept_with_source(4)
def _beside(actual: Side, golden: Named, place: Place) -> Projection:
    golden_side = open_side(golden)
    config = merged(actual.config, golden_side.config)
    if isinstance(golden_side, TruthSide):
        where = Coordinates(place.step or 0, place.update).stem
        related = golden_side.related(where)
        frame = golden_side.frame(where)
        return Projection(golden_side.values(where), frame, golden_side.text, config, related=related)
    names = [
        name
        for name, (type, where) in golden_side.entries.items()
        if type in (*MICRO_TYPES, *UPDATE_TYPES) and where.of_update == place
    ]
    found = _Recorded(golden_side, headers(golden_side, names))
    related = RelatedValues(
        before=_Neighbour(golden_side, place, -1),
        after=_Neighbour(golden_side, place, 1),
        trusted=golden_side.system == "golden",
        sampled=partial(_sampled, golden_side, place.step, headers(golden_side, names), found.frame),
        first=partial(_is_first, golden_side, place),
        optimizer=partial(_optimizer, golden_side, names),
    )
    return Projection(found.truth(), found.frame, None, config, related=related)


def _optimizer(side: Side, names: Sequence[str], parameter: str) -> tuple[Adam | None, float | None]:
    """Return the settings that records of the optimizer's state tell of a parameter, and its weight decay."""
    for name in names:
        if side.entries[name][0] == "optimizer" and (found := Adam.recorded(side.read(name).meta, parameter)):
            decay: Any = side.read(name).meta.get("weight_decay")
            own = decay.get(parameter) if isinstance(decay, Mapping) else decay
            return found, float(own) if isinstance(own, int | float) else None
    return None, None


def _sampled(side: Side, step: int | None, records: Sequence[Header], frame: TokenFrame) -> Mask | None:
    """Return the tokens that the rollouts hold to be sampled; None where they do not tell it of every sample."""
    known = rollouts_of(side, step or 0, records)
    parts = []
    for key, length in zip(frame.samples, frame.lengths, strict=True):
        masks = [rollout.loss_mask.astype(bool) for rollout in known.get(key, ())]
        if not masks or len(masks[0]) != length or any(not np.array_equal(masks[0], m) for m in masks):
            return None
        parts.append(masks[0])
    return np.concatenate(parts) if parts else None


def _is_first(side: Side, place: Place) -> bool:
    """Return True for the first update on its rollouts: they are not those of the step before, recorded again."""
    if place.update or not place.step:
        return not place.update
    own, last = (dict(_rollouts(side, step)) for step in (place.step, place.step - 1))
    return not own or own.keys() != last.keys() or any(not np.array_equal(own[k], last[k]) for k in own)


def _rollouts(side: Side, step: int) -> Iterator[tuple[SampleKey, Array]]:
    """Yield the samples of a step and their token ids, as far as they were recorded."""
    names = [n for n, (type, at) in side.entries.items() if type in MICRO_TYPES and at.step == step]
    found = _Recorded(side, headers(side, names))
    ids = found.truth().get("batch_inputs", {}).get("input_ids")
    if ids is not None:
        yield from zip(found.frame.samples, np.split(ids, found.frame.offsets[1:-1]), strict=True)


class _Neighbour(Mapping[str, Mapping[str, Array]]):
    """Gradients, parameters and states of the update before (-1) or after (1), read when they are asked for."""

    def __init__(self, side: Side, place: Place, by: int) -> None:
        self._side, self._place, self._by = side, place, by

    def __getitem__(self, quantity: str) -> Mapping[str, Array]:
        return self._truth[quantity]

    def __iter__(self) -> Iterator[str]:
        return iter(self._truth)

    def __len__(self) -> int:
        return len(self._truth)

    @cached_property
    def _truth(self) -> Mapping[str, Mapping[str, Array]]:
        entries = self._side.entries.items()
        known = sorted({where.of_update for _, (type, where) in entries if type in UPDATE_TYPES})
        if self._place.step is None or self._place not in known:
            return {}
        near = dict(enumerate(known)).get(known.index(self._place) + self._by)
        first, second = (near, self._place) if self._by < 0 else (self._place, near)
        if not _follows(first, second):
            return {}
        names = [name for name, (type, where) in entries if type in UPDATE_TYPES and where.of_update == near]
        return _Recorded(self._side, headers(self._side, names)).truth()


def _follows(first: Place | None, second: Place | None) -> bool:
    """Return True unless an update is missing between two."""
    if first is None or second is None:
        return False
    if second.update:
        return replace(second, update=second.update - 1) == first
    return second.step == (first.step or 0) + 1


def merged(config: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge one configuration over another, section by section."""
    found = dict(config)
    for key, value in over.items():
        below = found.get(key)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        found[key] = {**below, **value} if both else value  # type: ignore[dict-item]  # both are mappings
    return found


class _Recorded:
    """The records of one update of a dump."""

    def __init__(self, side: Side, records: Sequence[Header]) -> None:
        self._side = side
        self._records = [record for record in records if not record.problem and not record.local]
        self._copies = {
            (str(copy[0]), int(copy[1])) for record in records for copy, _ in record.meta.get("copies", ())
        }
        self._found: dict[tuple[str, str], list[tuple[Header, QuantitySource]]] = {}
        for record in self._records:
            for name in record.tensors:
                source = source_of(record.key.record_type, name)
                if source is not None and self._usable(record, source):
                    self._found.setdefault((source.quantity, source.name), []).append((record, source))

    @cached_property
    def frame(self) -> TokenFrame:
        """The samples of the update."""
        lengths = {key: n for key, n in lengths_of(self._records).items() if key not in self._copies}
        return TokenFrame(tuple(lengths), tuple(lengths.values()))

    def truth(self) -> dict[str, Mapping[str, Array]]:
        """Return the golden values as quantity -> tensors."""
        names: dict[str, list[str]] = {}
        for quantity, name in self._found:
            names.setdefault(quantity, []).append(name)
        if any(self._has_norm(record) for record in self._records):
            names["grad_norm"] = ["grad_norm"]
        return {
            quantity: Tensors(sorted(names[quantity]), self._loader(quantity)) for quantity in sorted(names)
        }

    def _has_norm(self, record: Header) -> bool:
        return record.key.record_type == "gradient" and isinstance(record.meta.get("grad_norm"), int | float)

    def _usable(self, record: Header, source: QuantitySource) -> bool:
        layout = record.layout(source.tensor)
        kind = quantity_named(source.quantity).kind
        if layout is None or kind is Kind.SHARE or math.prod(layout.shape) > LIMIT:
            return False
        if record.key.record_type in UPDATE_TYPES:
            return True
        return record.spans is not None and (kind is Kind.HIDDEN or record.spans.shape == layout.shape)

    def _loader(self, quantity: str) -> Callable[[str], Array | None]:
        def load(name: str) -> Array | None:
            if quantity == "grad_norm":
                norms = [r.meta["grad_norm"] for r in self._records if self._has_norm(r)]
                return np.array(norms[0], np.float64)
            found = self._found[quantity, name]
            primary = [row for row in found if row[1].primary] or found
            try:
                if quantity in UPDATE_TYPES:
                    return self._whole(primary)
                return self._tokens(found if quantity == "batch_inputs" else primary)
            except CompareError:
                return None  # a verdict on what cannot be understood is given where it is compared

        return load

    @cached_property
    def _loss(self) -> Mask | None:
        found = self._found.get(("batch_inputs", "response_mask"))
        whole = None if found is None else self._rows(found, None)
        return None if whole is None else whole.astype(bool)

    def _tokens(self, found: Sequence[tuple[Header, QuantitySource]]) -> Array | None:
        """Return values ``[frame.size, ...]``, or ``[K, ...]`` of the loss tokens; 0 where there is no loss token."""
        whole, quantity = self._rows(found, self._loss), found[0][1].quantity
        inside = quantity_named(quantity).kind is Kind.TOKEN and quantity not in EVERYWHERE
        if inside and self._loss is not None and whole is not None:
            whole[~self._loss] = 0
        return whole

    def _rows(self, found: Sequence[tuple[Header, QuantitySource]], loss: Mask | None) -> Array | None:
        read = [
            (self._side.read(record.name), record.places(self.frame.index, self.frame)) for record, _ in found
        ]
        rows_only = of_loss_tokens(read, found[0][1], loss)
        sources = [source for _, source in found]
        parts = [
            placed(r, source, places, loss, rows_only=rows_only)
            for (r, places), source in zip(read, sources, strict=True)
        ]
        if self.frame.size * math.prod(parts[0].part.inner.shape) > LIMIT:
            return None
        whole = gathered(parts, found[0][1].label, self.frame.size, loss)
        for one in parts:
            release(one.part.array)
        return whole

    def _whole(self, found: Sequence[tuple[Header, QuantitySource]]) -> Array:
        whole: Array | None = None
        for record, source in found:
            read = self._side.read(record.name)
            part = local_shard(key_of(read), read, source.tensor)
            if whole is None:
                whole = np.zeros(part.layout.shape, part.array.dtype)
            if whole.shape == part.layout.shape:
                part.layout.gather(part.array, whole)
        assert whole is not None
        return whole
