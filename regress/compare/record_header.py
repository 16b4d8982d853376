"""Headers of records: places of their tokens and shards, without the tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from regress.compare.alignment.local_shard import recorded_shards
from regress.compare.alignment.record_keys import Key, key_of
from regress.compare.alignment.token_places import Places
from regress.compare.alignment.token_spans import Spans
from regress.compare.quantities import UPDATE_TYPES
from regress.dump.numpy_arrays import dtype_name
from regress.dump.record import Record
from regress.errors import CompareError
from regress.layout import SampleKey, ShardLayout, TokenFrame, TokenLayout

PLACES = 1 << 24
"""Number of tokens that a layout may have, however small the tensors of its record are."""

LIGHT = (
    "weights_sha256",
    "grad_norm",
    "own_mean",
    "copies",
    "unnamed",
    "unplaced",
    "open",
    "derived",
    "sampler",
)
"""Metadata that a comparison is planned by."""


@dataclass(frozen=True)
class Header:
    """A record without its tensors.

    Attributes:
        name: name of its file.
        tensors: name -> dtype and shape, in recorded order.
        spans: places of its tokens, None for full tensors; ``rows`` those that rows of loss tokens follow.
        shards: tensor -> the part of it that lies here, as JSON.
        local: why its tensors mean something on their own rank only; empty where they do not.
        problem: why it cannot be placed, if so.
        bare: True if it should have a token layout, and has none.
    """

    name: str
    key: Key
    update: int
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    spans: Spans | None = None
    rows: Spans | None = None
    shards: Mapping[str, Any] = field(default_factory=dict)
    local: str = ""
    problem: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)
    bare: bool = False

    @property
    def samples(self) -> tuple[SampleKey, ...]:
        """Samples that have a token here."""
        return () if self.spans is None else self.spans.samples

    def layouts(self, index: Mapping[SampleKey, int], frame: TokenFrame) -> tuple[TokenLayout, TokenLayout]:
        """Return the layouts of its tokens and of rows of loss tokens in the sample numbers of a frame.

        Args:
            index: the frame's number of each sample, by the key that it has here.

        Raises:
            CompareError: if it has none.
        """
        if self.spans is None or self.rows is None:
            raise CompareError(self.problem)
        layout = self.spans.layout(index, frame)
        return layout, layout if self.rows is self.spans else self.rows.layout(index, frame)

    def places(self, index: Mapping[SampleKey, int], frame: TokenFrame) -> Places:
        """Return the tokens at the places of its tensors; see `layouts`."""
        return Places.of(*self.layouts(index, frame), frame.offsets)

    def by_token(self, name: str) -> bool:
        """Return True for a tensor ``[B, T, ...]`` or ``[B * T, ...]`` of the tokens that lie here."""
        B, T = (0, 0) if self.spans is None else self.spans.shape
        layout = self.layout(name)
        shape = self.tensors[name][1] if layout is None else layout.shape
        return shape[:2] == (B, T) or shape[:1] == (B * T,)

    def layout(self, name: str) -> ShardLayout | None:
        """Return the part of a full tensor that lies here; None where its shard layout is unusable."""
        if name not in self.shards:
            return ShardLayout.whole(self.tensors[name][1])
        try:
            return ShardLayout.from_json(self.shards[name])
        except (LookupError, TypeError, ValueError, ArithmeticError):
            return None


def header_of(name: str, record: Record) -> Header:
    """Return the header of a record."""
    key = key_of(record)
    spans, rows, problem = None, None, ""
    placed = record.type not in (*UPDATE_TYPES, "trajectory") and not record.meta.get("unplaced")
    bare = placed and record.meta.get("layout") is None
    if placed and not bare:
        try:
            spans = Spans.of(record.meta, str(key))
            recorded: Any = record.meta.get("rows")
            rows = spans if recorded is None else Spans.of(recorded, f"meta['rows'] of {key}")
            _refuse_more_than_held(key, (spans, rows), record)
        except CompareError as error:
            spans, rows, problem = None, None, str(error)
    tensors = {name: (dtype_name(array.dtype), array.shape) for name, array in record.tensors.items()}
    shards = recorded_shards(record)
    light = {k: v for k, v in record.meta.items() if k in LIGHT or (k in tensors and isinstance(v, str))}
    local = str(record.meta.get("rank_local") or "")
    return Header(name, key, record.update or 0, tensors, spans, rows, shards, local, problem, light, bare)


def _refuse_more_than_held(key: Key, layouts: Iterable[Spans], record: Record) -> None:
    """Refuse layouts with more tokens than a record of this size can hold, before arrays of that many are made."""
    most = max(PLACES, 64 * max((array.size for array in record.tensors.values()), default=0))
    for spans in layouts:
        claimed = max(spans.shape[0] * spans.shape[1], *(stop for _, _, stop, _, _ in spans.segments), 0)
        if claimed > most:
            raise CompareError(f"""the token layout of {key} claims {claimed} tokens, far more than its tensors have
            elements; record it again""")


def has_rows_of_loss_tokens(record: Header) -> bool:
    """Return True if a record of tokens has a tensor with a row for each loss token, not one for each token."""
    if record.spans is None:
        return False
    return any(
        isinstance(record.meta.get(name), str) or (shape != () and not record.by_token(name))
        for name, (_, shape) in record.tensors.items()
    )


def lengths_of(records: Iterable[Header]) -> dict[SampleKey, int]:
    """Return the number of tokens of each sample, as far as any of the records reaches."""
    found: dict[SampleKey, int] = {}
    for record in records:
        for spans in (record.spans, record.rows):
            for key, _, stop, _, _ in () if spans is None else spans.segments:
                found[key] = max(found.get(key, 0), stop)
    return found
