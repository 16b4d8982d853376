"""Rows of one step: the samples or datums of a dump with their values, each at its own token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regress.compare.alignment.token_spans import Spans
from regress.compare.dumps.opened_dump import Side
from regress.compare.dumps.sample_matching import Sample, Tokens, match_samples
from regress.dump.record import Record
from regress.dump.trajectory import rollouts_in
from regress.layout import SampleKey

Floats = NDArray[np.float64]
MASK = "mask"
OLD = "old_log_probs"
VALUES: Mapping[str, Mapping[str, str]] = {
    "batch_inputs": {"response_mask": MASK},
    "forward_data": {"response_mask": MASK, "log_probs": "log_probs"},
    "is_loss_debug": {
        "effective_valid": MASK,
        "log_probs": "log_probs",
        "old_log_probs": OLD,
        "advantages": "advantages",
        "weights": "weights",
        "prob_ratio": "ratio",
        "elementwise_loss": "loss",
    },
}
"""Record type -> tensor -> name of its values in a row; later record types tell more exactly."""


@dataclass
class ModeRow:
    """A sample, or a datum.

    Attributes:
        key: its name in its dump.
        tokens: ``[S]`` ids; None where nothing tells them.
        values: name -> ``[S]``, NaN where nothing was recorded: ``mask``, ``advantages``, ``weights``,
            ``old_log_probs``, ``log_probs``, ``ratio``, ``loss``, and ``sampler``, the log-probs of the sampler.
        reward: that of a rollout.
        reward, temperature: of a rollout, where they were recorded.
        id: the client's name of it, which is that of the rollout.
    """

    key: SampleKey
    tokens: NDArray[np.int64] | None = None
    values: dict[str, Floats] = field(default_factory=dict)
    reward: float | None = None
    temperature: float | None = None
    id: str | None = None

    @property
    def name(self) -> str:
        """Name for people."""
        return f"{self.key[0]}/{self.key[1]}"

    @property
    def size(self) -> int:
        """Number of its tokens, as far as they are known."""
        return 0 if self.tokens is None else self.tokens.size

    @property
    def content(self) -> bytes:
        """Tokens as a key; empty where nothing tells them."""
        return b"" if self.tokens is None else self.tokens.tobytes()

    @property
    def mask(self) -> NDArray[np.bool_] | None:
        """``[S]`` True at tokens that the loss counts, if that was recorded."""
        found = self.values.get(MASK)
        return None if found is None else np.nan_to_num(found) != 0

    def weighed(self) -> ModeRow:
        """Return this row with its advantages and losses multiplied by its weights, if it has any."""
        weights = self.values.pop("weights", None)
        for name in ("advantages", "loss"):
            values = self.values.get(name)
            if weights is not None and values is not None and values.size == weights.size:
                self.values[name] = values * weights
        return self

    def bare(self) -> ModeRow:
        """Return this row without values."""
        return ModeRow(self.key, self.tokens, id=self.id)

    @property
    def idle(self) -> bool:
        """True if its advantages are known, and all 0."""
        found = self.values.get("advantages")
        return found is not None and not np.nan_to_num(found).any()


def rows_of(side: Side, step: int) -> list[ModeRow]:
    """Return the samples of a step, with what any record tells of them."""
    rows: dict[SampleKey, ModeRow] = {}
    order = ("trajectory", "batch_inputs", "forward_data", "is_loss_debug")
    for record_type in order:
        for name, (type, where) in side.entries.items():
            if (type, where.step) != (record_type, step):
                continue
            record = side.read(name)
            if record_type == "trajectory":
                _rollouts(rows, record)
            else:
                _add(rows, record)
    return [*rows.values()]


def _rollouts(rows: dict[SampleKey, ModeRow], record: Record) -> None:
    samples: Any = record.meta["samples"]
    for t, sample in zip(rollouts_in(record), samples, strict=True):
        row = ModeRow(t.key, np.asarray(t.tokens, np.int64), reward=t.reward)
        row.values[MASK] = np.asarray(t.loss_mask, np.float64)
        if t.log_probs is not None:
            row.values["sampler"] = np.asarray(t.log_probs, np.float64)
        temperature = sample.get("temperature")
        row.temperature = float(temperature) if isinstance(temperature, int | float) else None
        rows[t.key] = row


def _add(rows: dict[SampleKey, ModeRow], record: Record) -> None:
    """Add the values of one record, at the tokens that it holds."""
    if not isinstance(record.meta.get("layout"), Mapping) or not record.meta.get("samples"):
        return
    if record.meta.get("open"):
        return
    spans = Spans.of(record.meta, record.type)
    for key in spans.samples:
        rows.setdefault(key, ModeRow(key))
    for key, at, ids in spans.runs(record.tensors.get("input_ids")):
        rows[key].tokens = known = _grown(rows[key].tokens, at.stop, np.int64(-1))
        known[at] = np.where(known[at] < 0, ids.astype(np.int64), known[at])
    for name, to in VALUES[record.type].items():
        for key, at, values in spans.runs(record.tensors.get(name)):
            row = rows[key]
            found = _grown(row.values.get(to), max(at.stop, row.size), np.float64(np.nan))
            row.values[to] = found
            found[at] = values.astype(np.float64)


def _grown(known: NDArray[Any] | None, size: int, fill: np.generic) -> NDArray[Any]:
    """Return an array of at least a size, what is new filled with a value."""
    recorded = np.zeros(0, fill.dtype) if known is None else known
    return np.concatenate([recorded, np.full(max(size - recorded.size, 0), fill)])


def pairs_of(golden: Sequence[ModeRow], actual: Sequence[ModeRow]) -> list[tuple[ModeRow, ModeRow]]:
    """Return the rows of both sides with the same tokens; of several those of one id, else the closest values."""
    named = {(row.id or row.name, row.content): row for row in golden}
    by_id = [(named.pop(key), row) for row in actual if (key := (row.id or "", row.content)) in named]
    left, right = {id(a) for a, _ in by_id}, {id(b) for _, b in by_id}
    golden = [row for row in golden if id(row) not in left]
    actual = [row for row in actual if id(row) not in right]
    mine, its = {row.key: row for row in golden}, {row.key: row for row in actual}

    def values(which: str, key: SampleKey) -> Mapping[str, Floats]:
        row = mine[key] if which == "golden" else its[key]
        return {name: row.values[name] for name in (OLD, "advantages") if name in row.values}

    matching = match_samples(_samples(golden), _samples(actual), values)
    return [*by_id, *((mine[to], its[key]) for key, to in matching.golden_of.items())]


def _samples(rows: Iterable[ModeRow]) -> list[Sample]:
    return [
        Sample(row.key, None if row.tokens is None else Tokens.of(row.tokens), named=False) for row in rows
    ]


def moved(mask: NDArray[np.bool_], by: int) -> NDArray[np.bool_]:
    """Return a mask with each token's value at the token ``by`` places later."""
    found = np.zeros(mask.size, bool)
    found[max(by, 0) : mask.size + min(by, 0)] = mask[max(-by, 0) : mask.size - max(by, 0)]
    return found
