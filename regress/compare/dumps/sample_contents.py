"""Samples of a step: their ids and tokens, and values that tell identical rollouts apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regress.compare.dumps.opened_dump import Side
from regress.compare.dumps.sample_matching import Sample, Tokens, Values, ValuesOf
from regress.compare.record_header import Header, lengths_of
from regress.dump.mapped_arrays import release
from regress.dump.record import Record
from regress.dump.trajectory import Rollout, rollouts_in
from regress.layout import SampleKey

TELLING = ("batch_inputs", "forward_data")
"""Records that hold token ids; those that are likelier to hold all of a sample come first."""

APART = (
    ("forward_data", "log_probs"),
    ("is_loss_debug", "advantages"),
    ("is_loss_debug", "old_log_probs"),
    ("token_gradient", "token_gradient"),
    ("is_loss_debug", "effective_valid"),
    ("forward_data", "response_mask"),
)
"""Token values that tell identical rollouts apart."""


def samples_of(side: Side, records: Sequence[Header]) -> list[Sample]:
    """Return the samples of a step in recorded order: those of its rollouts, and those that only other records have."""
    found: dict[SampleKey, Sample] = {}
    for record in records:
        if record.key.record_type == "trajectory":
            for t in rollouts_in(side.read(record.name)):
                found[t.key] = Sample(t.key, Tokens.of(t.tokens))
                release(t.tokens)
    unknown = [r for r in records if not {*r.samples} <= found.keys()]
    contents = tokens_in(side, [r for r in records if r.key.record_type in TELLING], found) if unknown else {}
    for record in unknown:
        copies = {_key(copy): _key(original) for copy, original in record.meta.get("copies", ())}
        for key in record.samples:
            content = None if record.meta.get("open") else contents.get(key)
            found.setdefault(key, Sample(key, content, copy_of=copies.get(key)))
    unnamed = {_key(key) for record in records for key in record.meta.get("unnamed", ())}
    places = _places(records)
    return [
        replace(sample, named=sample.key not in unnamed, place=places.get(sample.key))
        for sample in found.values()
    ]


def rollouts_of(side: Side, step: int, records: Sequence[Header]) -> dict[SampleKey, list[Rollout]]:
    """Return the rollouts of each sample of an update, as the last step that has some tells them.

    A sample goes with the rollout of its id, else with all that have its tokens.
    """
    tapped = {
        name: at.step for name, (type, at) in side.entries.items() if type == "trajectory" and at.step <= step
    }
    last = max(tapped.values(), default=0)
    known = [t for name in tapped if tapped[name] == last for t in rollouts_in(side.read(name))]
    known = [rollout for rollout in known if not rollout.is_val]
    found = {rollout.key: [rollout] for rollout in known}
    telling = [record for record in records if record.key.record_type in TELLING]
    of_tokens: dict[Tokens, list[Rollout]] = {}
    for rollout in known:
        of_tokens.setdefault(Tokens.of(rollout.tokens), []).append(rollout)
    for key, tokens in tokens_in(side, telling, found).items() if known else ():
        found[key] = of_tokens.get(tokens, [])
    return found


def groups_of(side: Side, step: int, records: Sequence[Header]) -> dict[SampleKey, tuple[str, int]]:
    """Return the group of each sample of an update, and the number of its rollouts; of several groups none."""
    known = rollouts_of(side, step, records)
    sizes = Counter(group for group, _ in {rollout.key for own in known.values() for rollout in own})
    groups = {key: {rollout.key[0] for rollout in own} for key, own in known.items()}
    return {key: (group, sizes[group]) for key, own in groups.items() if len(own) == 1 for group in own}


def _places(records: Iterable[Header]) -> dict[SampleKey, tuple[int, int, int]]:
    """Return the rank, microbatch and row of each sample of ``forward_data``."""
    found: dict[SampleKey, tuple[int, int, int]] = {}
    for record in records:
        if record.key.record_type == "forward_data" and record.spans is not None:
            for key, _, _, row, _ in record.spans.segments:
                found.setdefault(key, (record.key.rank or 0, record.key.micro or 0, row))
    return found


def _key(value: Any) -> SampleKey:
    return str(value[0]), int(value[1])


def tokens_in(
    side: Side, records: Sequence[Header], known: Iterable[SampleKey] = ()
) -> dict[SampleKey, Tokens]:
    """Return the tokens of samples for which records hold every position."""
    skipped = set(known)
    keys = {key for record in records for key in record.samples} - skipped
    return {key: Tokens.of(ids) for key, ids in token_ids(side, records, keys).items()}


def token_ids(
    side: Side, records: Sequence[Header], keys: Collection[SampleKey]
) -> dict[SampleKey, NDArray[np.int64]]:
    """Return the token ids of samples for which records hold every position."""
    telling = [
        record
        for record in records
        if record.spans is not None and "input_ids" in record.tensors and {*record.samples} & {*keys}
    ]
    sizes = lengths_of(telling)
    tokens: dict[SampleKey, NDArray[np.int64]] = {}
    known: dict[SampleKey, NDArray[np.bool_]] = {}
    for record in telling:
        ids = side.read(record.name).tensors["input_ids"]
        for key, at, values in () if record.spans is None else record.spans.runs(ids):
            if key in keys:
                with np.errstate(invalid="ignore"):  # NaN is not an id
                    tokens.setdefault(key, np.zeros(sizes[key], np.int64))[at] = values
                known.setdefault(key, np.zeros(sizes[key], bool))[at] = True
    return {key: found for key, found in tokens.items() if known[key].all()}


def values_of(
    golden_side: Side, golden: Sequence[Header], actual_side: Side, actual: Sequence[Header]
) -> Values:
    """Return a reader of the values computed for a sample."""

    def of(which: str, key: SampleKey) -> ValuesOf:
        side, records = (golden_side, golden) if which == "golden" else (actual_side, actual)
        return _values(side, records, key)

    return of


def _values(side: Side, records: Sequence[Header], key: SampleKey) -> ValuesOf:
    found: dict[str, NDArray[np.float64]] = {}
    for record in records:
        if record.key.record_type == "trajectory":
            found |= _rollout(side.read(record.name), key)
    for record_type, name in APART:
        values: dict[int, float] = {}
        for record in records:
            if record.key.record_type != record_type or name not in record.tensors or record.spans is None:
                continue
            if key not in record.samples:
                continue
            for other, at, here in record.spans.runs(side.read(record.name).tensors[name]):
                if other == key:
                    found_here = here.astype(np.float64).tolist()
                    values |= dict(zip(range(at.start, at.stop), found_here, strict=True))
        if values:
            found[name] = np.array([values[position] for position in sorted(values)])
    return found


def _rollout(record: Record, key: SampleKey) -> ValuesOf:
    for t in rollouts_in(record):
        if t.key == key:
            tensors = {"reward": np.array([t.reward], np.float64)}
            return tensors if t.log_probs is None else tensors | {"sampler": t.log_probs.astype(np.float64)}
    return {}
