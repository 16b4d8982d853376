"""The records of one update on one side, at their places: headers, the tokens there, and tensors when asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from regress.compare.alignment.element_names import Locator
from regress.compare.alignment.local_shard import Shard, local_shard
from regress.compare.alignment.record_keys import Key
from regress.compare.alignment.shard_overlap import IntervalIndex
from regress.compare.alignment.token_places import Mask, Places, RecordedTokens, recorded_tokens
from regress.compare.alignment.token_spans import NO_LAYOUT
from regress.compare.quantities import LOSS_TYPES, MASKS, MICRO_TYPES, UPDATE_TYPES, Kind, quantity_named
from regress.compare.record_header import Header, header_of, lengths_of
from regress.compare.record_plan import Plan
from regress.compare.verdicts.tensor_case import Locate
from regress.dump.record import Record
from regress.errors import CompareError
from regress.layout import SampleKey, ShardLayout, TokenFrame, TokenLayout

Root = Callable[[int | None], int]
"""Function that returns the rank whose tokens a rank repeats, which may be itself."""


class Records:
    """All records of an update on one side.

    Args:
        headers: in recorded order.
        read: returns a record by its name.
        frame: the samples of the update, in canonical order.
        root: the rank whose tokens a rank repeats; by default each has tokens of its own.
        index: number in the frame of each sample, by the key that it has here; by default the frame's own.
            Samples without a number are left out.

    Attributes:
        all: headers at each place, where there should be one.
    """

    def __init__(
        self,
        headers: Iterable[Header],
        read: Callable[[str], Record],
        frame: TokenFrame,
        root: Root | None = None,
        index: Mapping[SampleKey, int] | None = None,
    ) -> None:
        self.all: dict[Key, list[Header]] = {}
        for header in headers:
            self.all.setdefault(header.key, []).append(header)
        self.frame, self.root = frame, root or (lambda rank: rank or 0)
        self.index = frame.index if index is None else index
        self._read, self._strict = read, index is None
        self._layouts: dict[Key, tuple[TokenLayout, TokenLayout]] = {}
        self._places: dict[Key, Places] = {}
        self._shards: dict[tuple[Key, str], Shard] = {}

    @classmethod
    def of(
        cls, records: Iterable[Record], frame: TokenFrame | None = None, root: Root | None = None
    ) -> Records:
        """Return records in memory.

        Args:
            frame: by default the samples that the records name, each as long as any of them reaches.
        """
        named = {f"{record.type}/{number}": record for number, record in enumerate(records)}
        headers = [header_of(name, record) for name, record in named.items()]
        return cls(headers, named.__getitem__, frame or frame_of(headers), root)

    @property
    def headers(self) -> Iterator[Header]:
        """All headers, those of doubled records included."""
        return (header for found in self.all.values() for header in found)

    def header(self, key: Key) -> Header | None:
        """Return the header at a place, the first where there are several."""
        return self.all[key][0] if key in self.all else None

    def get(self, key: Key) -> Record | None:
        """Return the record at a place, the first where there are several."""
        return self.read(key) if key in self.all else None

    def read(self, key: Key) -> Record:
        """Return the record at a place that has one."""
        return self._read(self.all[key][0].name)

    def one_each(self) -> dict[Key, Record]:
        """Return the record at each place; raise `CompareError` where there are several."""
        for key, found in self.all.items():
            if len(found) > 1:
                raise CompareError(
                    f"{key} was recorded {len(found)} times, so it has no one value; keep one record"
                )
        return {key: self.read(key) for key in self.all}

    def of_types(self, record_types: Iterable[str]) -> list[Key]:
        """Return the places that have a record of some types."""
        return [key for key in self.all if key.record_type in record_types]

    def names(self, keys: Iterable[Key]) -> list[str]:
        """Return the tensors that any of the records holds."""
        return list(dict.fromkeys(name for key in keys for name in self.all[key][0].tensors))

    # tokens

    @cached_property
    def misfits(self) -> dict[Key, str]:
        """Records of tokens whose layout is unusable, or, in the update's own samples, of others: the reason."""
        found = {key: self._misfit(headers[0]) for key, headers in self.all.items()}
        return {key: why for key, why in found.items() if why}

    def _misfit(self, header: Header) -> str:
        key = header.key
        if key.record_type in UPDATE_TYPES or header.problem or not self._strict:
            return header.problem
        if header.spans is None or header.rows is None:
            return f"{key} has no usable token layout: {NO_LAYOUT}"
        own = header.spans.misfit(str(key), self.frame)
        return own or header.rows.misfit(f"meta['rows'] of {key}", self.frame)

    def placed(self, key: Key) -> bool:
        """Return True if the tokens at a place are known."""
        header = self.header(key)
        return header is not None and header.spans is not None and key not in self.misfits

    def layouts(self, key: Key) -> tuple[TokenLayout, TokenLayout]:
        """Return the layout of a record whose tokens are known, and that of its rows of loss tokens."""
        if key not in self._layouts:
            self._layouts[key] = self.all[key][0].layouts(self.index, self.frame)
        return self._layouts[key]

    def layout(self, key: Key) -> TokenLayout:
        """Return the layout of a record whose tokens are known."""
        return self.layouts(key)[0]

    def places(self, key: Key) -> Places:
        """Return the tokens at the places of a record whose tokens are known."""
        if key not in self._places:
            self._places[key] = Places.of(*self.layouts(key), self.frame.offsets)
        return self._places[key]

    def lead(self, key: Key, shape: tuple[int, ...]) -> tuple[NDArray[np.int64], int] | None:
        """Return the token of each row of a whole tensor with a place for each, and how many dimensions are places."""
        return self.places(key).lead(shape) if self.placed(key) else None

    def once(
        self,
        record_type: str,
        name: str | None = None,
        *,
        first: int = 0,
        without: frozenset[SampleKey] = frozenset(),
    ) -> dict[Key, NDArray[np.int64]]:
        """Return the tokens of a type's records, of ranks that repeat each other's tokens those of one.

        Args:
            name: a tensor that the records must have; by default any.
            first: position of the first token of a sample that counts.
            without: samples that do not count.
        """
        found: dict[tuple[int, int | None], tuple[Key, NDArray[np.int64]]] = {}
        for key in sorted(self.of_types([record_type]), key=lambda key: (key.rank or 0, key.micro or 0)):
            for header in self.all[key][:1] if self._strict else self.all[key]:
                place = self.root(key.rank), key.micro
                spans = None if key in self.misfits else header.spans
                if spans is None or place in found or (name is not None and name not in header.tensors):
                    continue
                runs = [
                    np.arange(max(start, first), stop) + self.frame.offsets[self.index[sample]]
                    for sample, start, stop, _, _ in spans.segments
                    if sample in self.index and sample not in without
                ]
                found[place] = key, np.concatenate([np.zeros(0, np.int64), *runs])
        return dict(found.values())

    @cached_property
    def recorded(self) -> RecordedTokens:
        """Token ids and loss tokens, as far as the records tell them."""
        telling = [key for record_type in MASKS for key in self.of_types([record_type]) if self.placed(key)]
        return recorded_tokens(((self.read(key), self.places(key)) for key in telling), self.frame.size)

    @property
    def loss_tokens(self) -> Mask | None:
        """Loss tokens ``[frame.size]``, as far as the records tell them; None if none of them does."""
        return self.recorded.loss

    def words(self, key: Key, quantity: str, shape: tuple[int, ...], locator: Locator) -> Locate | None:
        """Return canonical words for a whole tensor's elements; None where only indices name them."""
        return (
            words_at(self.places(key), quantity, shape, locator, self.recorded.loss)
            if self.placed(key)
            else None
        )

    # ranks side by side

    def groups(self, record_type: str) -> list[list[Key]]:
        """Return groups of records with the same tokens, or of all full tensors and shards; ascending by rank."""
        found: dict[tuple[int | None, int | None], list[Key]] = {}
        for key in sorted(self.of_types([record_type]), key=lambda key: (key.micro or 0, key.rank or 0)):
            whole = record_type in UPDATE_TYPES
            found.setdefault((None, None) if whole else (self.root(key.rank), key.micro), []).append(key)
        return [*found.values()]

    def alike(self, one: Key, other: Key) -> bool:
        """Return True if the same tokens lie at the same places of two records, or neither has any."""
        known = [self.layouts(key) if self.placed(key) else None for key in (one, other)]
        return known[0] == known[1]

    def shards(self, name: str, keys: Iterable[Key]) -> Iterator[Shard]:
        """Yield the shards of a tensor that ranks hold; unusable ones are verdicts at their place."""
        for key in keys:
            if name in self.all[key][0].tensors and (key, name) not in self._shards:
                with suppress(CompareError):
                    self._shards[key, name] = local_shard(key, self.read(key), name)
            if (key, name) in self._shards:
                yield self._shards[key, name]

    def held_twice(self, record_type: str) -> bool:
        """Return True if several ranks hold an element, or compute a token, of a record type."""
        if record_type not in UPDATE_TYPES:
            return any(len(keys) > 1 for keys in self.groups(record_type))
        sizes: dict[tuple[str, tuple[int, ...]], int] = {}
        for header in (self.all[key][0] for key in self.of_types([record_type])):
            for name in header.tensors:
                layout = header.layout(name)
                if layout is not None:
                    part = name, layout.shape
                    sizes[part] = sizes.get(part, 0) + math.prod(layout.local_shape)
        return any(count > math.prod(shape) for (_, shape), count in sizes.items())


def words_at(
    places: Places, quantity: str, shape: tuple[int, ...], locator: Locator, loss: Mask | None
) -> Locate | None:
    """Return canonical words for the elements of a whole tensor of tokens; None where only indices name them."""
    if quantity_named(quantity).kind is Kind.SHARE:
        return None
    found = places.lead(shape)
    if found is not None:
        return locator.rows(found[0], shape[found[1] :], places.grid[1])
    if loss is None or len(shape) < 2:
        return None
    rows = places.loss_rows(loss)
    return locator.rows(rows, shape[-1:], None) if len(rows) == shape[-2] else None


def frame_of(headers: Iterable[Header]) -> TokenFrame:
    """Return the samples that records name, each with the largest number of tokens that any of them holds."""
    lengths = lengths_of(headers)
    return TokenFrame(tuple(lengths), tuple(lengths.values()))


def plan_of(records: Records, roots: Mapping[int, int] | None = None) -> Plan:
    """Infer the plan of an update from its records: ranks, microbatches, and ranks that repeat each other.

    Args:
        roots: rank -> the rank whose tokens it repeats, if a mesh tells it; otherwise ranks repeat each other whose
            tokens lie alike in all microbatches.
    """
    found = records.of_types(MICRO_TYPES)
    keys = sorted(found, key=lambda key: (MICRO_TYPES.index(key.record_type), key.rank or 0, key.micro or 0))
    micros = tuple(dict.fromkeys((key.rank or 0, key.micro or 0) for key in keys))
    if roots is not None and any(rank != root for rank, root in roots.items()):
        return Plan(micros, roots)
    tokens: dict[int, list[object]] = {}
    for key in keys:
        if key.record_type == keys[0].record_type:
            layout = records.layout(key) if records.placed(key) else None
            tokens.setdefault(key.rank or 0, []).append(layout)
    replicas = {}
    for rank, own in tokens.items():
        same = next(other for other, theirs in tokens.items() if theirs == own)
        if same != rank and None not in own:
            replicas[rank] = same
    return Plan(micros, replicas)


def tokens_of(record_type: str, frame: TokenFrame, loss_tokens: Mask | None) -> Mask | None:
    """Return the tokens ``[frame.size]`` that the records of a type must have together; None for all."""
    if record_type not in LOSS_TYPES:
        return None
    if loss_tokens is not None:
        return loss_tokens
    predicted = np.ones(frame.size, bool)
    predicted[frame.offsets[:-1]] = False
    return predicted


def likeliest(found: Iterable[Header], record: Header) -> list[Header]:
    """Return records of the other side, those of the rank and microbatch of this one first."""
    rank, micro = record.key.rank, record.key.micro
    return sorted(
        found, key=lambda g: (g.key.rank != rank, g.key.micro != micro, g.key.rank or 0, g.key.micro or 0)
    )


class Holders:
    """The golden records of a type, looked up by the parts of full tensors that they hold."""

    def __init__(self, golden: Iterable[Header]) -> None:
        self._golden = sorted(golden, key=lambda record: record.key.rank or 0)
        self._parts: dict[str, dict[tuple[int, ...], dict[ShardLayout, list[Header]]]] = {}
        self._near: dict[tuple[str, tuple[int, ...]], IntervalIndex] = {}
        self._unusable: list[Header] = []
        for record in self._golden:
            for name in record.tensors:
                layout = record.layout(name)
                if layout is None:
                    self._unusable.append(record)
                    continue
                shapes = self._parts.setdefault(name, {})
                shapes.setdefault(layout.shape, {}).setdefault(layout, []).append(record)

    def of(self, record: Header) -> list[Header]:
        """Return the golden records that an actual one is compared with, that of its own rank first.

        If several ranks hold a part, one of them stands for all, that of the same rank if it is among them. If no
        golden tensor has that shape, those of other shapes are returned, so that shapes are compared. A record that
        cannot be used is returned, too, to be reported. If nobody holds any of it, one record remains to compare
        metadata with.
        """
        found = {other.name: other for other in self._unusable}
        for name in record.tensors:
            layout, shapes = record.layout(name), self._parts.get(name, {})
            if layout is None:
                continue
            if layout.shape in shapes:
                parts = shapes[layout.shape]
                near = [layout] if layout in parts else self._overlapping(name, layout, [*parts])
                chosen = [likeliest(parts[one], record)[0] for one in near]
            else:
                chosen = [next(iter(parts.values()))[0] for parts in shapes.values()]
            found |= {other.name: other for other in chosen}
        return likeliest(found.values() or self._golden[:1], record)

    def _overlapping(self, name: str, layout: ShardLayout, parts: list[ShardLayout]) -> list[ShardLayout]:
        index = self._near.setdefault((name, layout.shape), IntervalIndex(parts))
        return [parts[i] for i in index.of(layout.ranges)]
