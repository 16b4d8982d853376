"""A trainer's own dump as a client would send it: advantages with their weights, without the samples it drops.

A client of a training service computes advantages and denominators itself, and the service sums over tokens. So what
the service calls an advantage is the product of a token's advantage and weight, and what it calls a token's loss is
the loss times the weight. Samples whose advantages are all 0 have no gradient, and clients drop them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from regress.compare.dumps.source_view import SourceView
from regress.dump.coordinates import Coordinates
from regress.dump.numpy_arrays import Array
from regress.dump.record import Record
from regress.dump.source_readers import Source
from regress.dump.trajectory import rollouts_in
from regress.layout import SampleKey

PREFIX = "sent-"
WEIGHTED, DROPPED, RECORDED, ACTIVE, CUSTOM = "weighted", "dropped", "recorded", "active", "custom"
SUMMED = "summed"
_MASKS = ("response_mask", "effective_valid")
_PRODUCTS = ("advantages", "elementwise_loss", "policy_loss")
_OF_ANY_LOSS = (
    "log_probs",
    "entropy",
    "input_ids",
    "attention_mask",
    "position_ids",
    "hidden_states",
    "logits",
)
"""Tensors that are the same whichever loss the service computes."""
_PLAIN_SUMS = ("entropy_loss", "kl_loss")
"""Shares that a service sums without any weight, so that they are others than those of the trainer."""
_TOKENS = ("batch_inputs", "forward_data", "is_loss_debug", "loss")


def is_sent(source: str) -> bool:
    """Distinguish such a view from a folder or URL."""
    return source.startswith(PREFIX) and ":" in source


def sent(source: str, flags: Collection[str]) -> str:
    """Return the name of a view; the source itself without any flag."""
    return f"{PREFIX}{'-'.join(sorted(flags))}:{source}" if flags else source


def flags_of(source: str) -> tuple[frozenset[str], str]:
    """Return the flags of a view, and the source that it is of."""
    flags, _, whole = source.removeprefix(PREFIX).partition(":")
    return frozenset(flags.split("-")), whole


def original(source: str) -> str:
    """Return the source that a view is of, any other source itself."""
    return flags_of(source)[1] if is_sent(source) else source


class WireView(SourceView):
    """View of a dump.

    Args:
        flags: ``weighted`` to multiply by weights, ``dropped`` to leave out samples without any advantage,
            ``active`` to count no token of them in the loss (a wire without masks tells tokens by their advantages),
            ``summed`` to leave out what a service sums without any weight, which ``weighted`` does, too,
            ``custom`` to leave out what is of the loss: the service computes another one, the sum of log-probs times
            weights that a client derived from its own loss,
            ``recorded`` to judge nothing that was not turned on for this dump, as types differ between modes.
    """

    def __init__(self, whole: Source, flags: frozenset[str]) -> None:
        super().__init__(whole)
        self.flags = frozenset(flags)

    @cached_property
    def entries(self) -> Mapping[str, tuple[str, Coordinates]]:
        """Records of the dump, without those of dropped samples alone."""
        found = dict(self.whole.entries)
        for name, (type, where) in self.whole.entries.items():
            dropped = self.dropped(where.step) if type in _TOKENS else frozenset()
            if (dropped and {*_samples(self.whole.read(name))} <= dropped) or (
                type == "loss" and CUSTOM in self.flags
            ):
                del found[name]
        return found

    def dropped(self, step: int) -> frozenset[SampleKey]:
        """Return the samples of a step that the view leaves out."""
        return self._idle(step) if DROPPED in self.flags else frozenset()

    def _idle(self, step: int) -> frozenset[SampleKey]:
        if step not in self._known:
            self._known[step] = frozenset(without_advantage(self.whole, step))
        return self._known[step]

    @cached_property
    def _known(self) -> dict[int, frozenset[SampleKey]]:
        return {}

    def read(self, name: str) -> Record:
        """Read one record."""
        record = self.whole.read(name)
        type, where = self.entries[name]
        if type == "is_loss_debug" and WEIGHTED in self.flags:
            record = weighted(record)
        if type == "loss" and self.flags & {WEIGHTED, SUMMED}:
            kept = {name: array for name, array in record.tensors.items() if name not in _PLAIN_SUMS}
            record = replace(record, tensors=kept)
        if type in _TOKENS and CUSTOM in self.flags:
            kept = {name: array for name, array in record.tensors.items() if name in _OF_ANY_LOSS}
            record = replace(record, tensors=kept)
        elif type in _TOKENS and ACTIVE in self.flags:
            record = _uncounted(record, self._idle(where.step))
        return _without(record, self.dropped(where.step)) if type in _TOKENS else record

    def writes(self, record_type: str, tensor: str | None = None) -> bool:
        """Return True if the dump could have a record type, or a tensor of it."""
        if self.flags & {WEIGHTED, SUMMED} and record_type == "loss" and tensor in _PLAIN_SUMS:
            return False
        if CUSTOM in self.flags and (
            record_type == "loss" or (record_type in _TOKENS and tensor not in (None, *_OF_ANY_LOSS))
        ):
            return False
        if RECORDED in self.flags and not any(record_type == type for type, _ in self.whole.entries.values()):
            return False
        return super().writes(record_type, tensor)


def weighted(record: Record) -> Record:
    """Return a record of loss terms with each term multiplied by its token's weight, which is then 1."""
    weights = record.tensors.get("weights")
    if weights is None:
        return record
    tensors: dict[str, Array] = {}
    for name, array in record.tensors.items():
        if name in _PRODUCTS and array.shape == weights.shape:
            product = array.astype(np.float64) * weights.astype(np.float64)
            tensors[name] = product.astype(array.dtype)
        else:
            tensors[name] = array
    tensors["weights"] = (weights != 0).astype(weights.dtype)
    return replace(record, tensors=tensors)


def _uncounted(record: Record, idle: frozenset[SampleKey]) -> Record:
    """Return a record whose masks count no token of some samples."""
    places = [(row, columns) for key, row, columns in _places(record) if key in idle]
    tensors = dict(record.tensors)
    for name in _MASKS if places else ():
        if name in tensors:
            tensors[name] = tensors[name].copy()
            for at in places:
                tensors[name][at] = 0
    return replace(record, tensors=tensors)


def without_advantage(side: Source, step: int) -> set[SampleKey]:
    """Return the samples of a step whose advantages are all 0.

    Where advantages were not recorded they are 0 for a group whose rewards are all the same.
    """
    found, other = set[SampleKey](), set[SampleKey]()
    recorded = False
    for name, (type, where) in side.entries.items():
        if type != "is_loss_debug" or where.step != step:
            continue
        record = side.read(name)
        values = record.tensors.get("advantages")
        if values is None:
            continue
        recorded = True
        for key, row, columns in _places(record):
            (other if values[row, columns].any() else found).add(key)
    return found - other if recorded else _of_equal_rewards(side, step)


def _of_equal_rewards(side: Source, step: int) -> set[SampleKey]:
    groups: dict[str, dict[SampleKey, float]] = {}
    for name, (type, where) in side.entries.items():
        if type == "trajectory" and where.step == step:
            for t in rollouts_in(side.read(name)):
                groups.setdefault(t.key[0], {})[t.key] = t.reward
    equal = (rewards for rewards in groups.values() if len(rewards) > 1 and len({*rewards.values()}) == 1)
    return {key for rewards in equal for key in rewards}


def _places(record: Record) -> Iterable[tuple[SampleKey, int, slice]]:
    layout: Any = record.meta.get("layout")
    if not isinstance(layout, dict):
        return
    for key, (_, start, stop, row, col) in zip(_samples(record), layout["segments"], strict=True):
        yield key, row, slice(col, col + stop - start)


def _samples(record: Record) -> list[SampleKey]:
    named: Any = record.meta.get("samples") or []
    return [(str(group), int(run)) for group, run in named]


def _without(record: Record, dropped: frozenset[SampleKey]) -> Record:
    """Return a record whose layout leaves some samples out, as if they were padding."""
    layout: Any = record.meta.get("layout")
    if not dropped or not isinstance(layout, dict):
        return record
    named_samples: Any = record.meta["samples"]
    pairs = zip(_samples(record), named_samples, layout["segments"], strict=True)
    kept = [(named, segment) for key, named, segment in pairs if key not in dropped]
    meta = {
        **record.meta,
        "samples": [named for named, _ in kept],
        "layout": {**layout, "segments": [segment for _, segment in kept]},
    }
    return replace(record, meta=meta)
