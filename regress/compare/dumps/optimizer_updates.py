"""Parameter differences that AdamW makes of recorded gradients: it divides a gradient by its own size.

Where a gradient is as small as its rounding, two correct runs may move a parameter by the learning rate in opposite
directions. The recorded gradients, or optimizer states, of both sides tell that element by element: AdamW is applied
to those of each side, and what the two make of them is no fault of the update. A wrong rate, a skipped update or a
turned sign differ where the gradients agree, too, so they stay beyond every bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from regress.compare.alignment.keys import key_of
from regress.compare.alignment.local_shard import Shard, local_shard
from regress.compare.alignment.shard_overlap import shard_blocks
from regress.compare.dumps.adam import Adam, Floats
from regress.compare.dumps.moments import STATE
from regress.compare.dumps.sides import Side
from regress.compare.verdicts.verdict import Place
from regress.dump.arrays import Array
from regress.dump.record import Record
from regress.errors import CompareError
from regress.layout import ShardLayout

At: TypeAlias = tuple[int, int]
"""Step, and update within it."""
FEW = 0.1
"""Largest part of a tensor that near-zero gradients may hold: a wrong update moves more of it."""


@dataclass(frozen=True)
class Difference:
    """Most that the updates so far can have moved a parameter apart.

    Attributes:
        allowed: for each element, from recorded gradients or states; None where they are not recorded.
        limit: for any element, whatever its gradients; None where the optimizer is unknown.
    """

    allowed: Floats | None = None
    limit: float | None = None

    def undecided(self, error: Floats, bound: float) -> bool:
        """Return True if nothing tells a wrong update from near-zero gradients: few elements are off, and by little."""
        over = error > bound
        few = int(over.sum()) <= max(1, int(FEW * error.size))
        return self.limit is not None and few and bool((error <= self.limit + bound).all())


@dataclass(frozen=True)
class Updated:
    """A failing parameter beside the differences that its optimizer explains.

    Attributes:
        explained: the actual values, the golden ones where the recorded gradients explain the difference; None where
            they explain none.
        note: their number, in words.
        doubt: why nothing tells whether the failure is a fault; empty if something does.
    """

    explained: Array | None = None
    note: str = ""
    doubt: str = ""

    @classmethod
    def of(
        cls,
        sides: tuple[Side, Side],
        records: tuple[str, str],
        place: Place,
        name: str,
        actual: Shard,
        golden: Sequence[Shard],
        bound: float,
        relative: Mapping[str, float],
    ) -> Updated:
        """Compare a parameter with what AdamW makes of the recorded gradients.

        Args:
            records: names of the golden and of the actual record that hold it.
            bound: tolerance of the parameter, which rounding may add.
            relative: those of ``gradient`` and ``optimizer``, relative to the largest golden value.
        """
        here, layout = actual.array.astype(np.float64), actual.layout
        there = _together(golden, layout)
        if there is None or not np.isfinite(here).all() or not np.isfinite(there).all():
            return cls()
        own, other = (side.entries[record][1] for side, record in zip(sides, records, strict=True))
        at = _at(own.step, own.update), _at(other.step, other.update)
        found = difference(sides, at, name, layout, relative)
        error = np.abs(here - there)
        if found.allowed is None:
            return cls(doubt=_doubt(name, place, error, bound) if found.undecided(error, bound) else "")
        settled = (error > bound) & (found.allowed > 0) & (error <= found.allowed + bound)
        if not settled.any():
            return cls()
        much = f"{int(settled.sum())} of {error.size} elements"
        note = (
            f"param {name}: {much} differ beyond the tolerance, by {error[settled].max():.2g} at most, and by no "
            "more than AdamW makes of the gradients recorded on both sides, each divided by its own size: they count "
            "as equal"
        )
        return cls(np.where(settled, there.astype(actual.array.dtype), actual.array), note)


def _doubt(name: str, place: Place, error: Floats, bound: float) -> str:
    return (
        f"{place}: param {name}: {int((error > bound).sum())} of {error.size} elements are off by "
        f"{error.max():.2g} at most, as far as AdamW may move them apart where gradients are nearly zero, and nothing "
        "tells whether it did: record gradient (or optimizer) of every update from the first on in both dumps, or "
        "give --rtol and --atol"
    )


def difference(
    sides: tuple[Side, Side],
    at: tuple[At, At],
    name: str,
    layout: ShardLayout,
    relative: Mapping[str, float],
) -> Difference:
    """Return how far apart AdamW moves a parameter, given what both sides recorded of each update up to one.

    Gradients that differ by more than their own tolerance explain nothing: they are the fault.

    Args:
        at: the update after which each side recorded the parameter.
        layout: part of the parameter that is compared.
        relative: tolerance of ``gradient`` and ``optimizer``, relative to the largest golden value.
    """
    adam = Adam.of(sides[0].config) or Adam.of(sides[1].config)
    if adam is None:
        return Difference()
    golden, actual = (_updates(side, last) for side, last in zip(sides, at, strict=True))
    limit = 2 * adam.most * (at[0][0] + 1) * (1 + max((update for _, update in golden), default=at[0][1]))
    if len(golden) != len(actual) or not _from_the_start(golden) or not _from_the_start(actual):
        return Difference(limit=limit)
    allowed = np.zeros(layout.local_shape)
    runs = [_made(side, own, name, layout, adam) for side, own in zip(sides, (golden, actual), strict=True)]
    for place, first, second in zip(golden, *runs, strict=True):
        if first is None or second is None or first.stage != second.stage:
            return Difference(limit=limit)
        bound = relative[first.stage] * _scale(sides[0], first, place, name)
        alike = np.abs(first.source - second.source) <= bound
        allowed += np.where(alike, adam.rate * np.abs(first.direction - second.direction), 0.0)
    return Difference(allowed, limit)


def _scale(side: Side, made: Made, at: At, name: str) -> float:
    """Return the largest value of a tensor on any rank; of a bias at least that of its weight, whose terms it sums."""
    module, bias, _ = name.rpartition(".bias")
    names = (name, f"{module}.weight") if bias else (name,)
    wanted = {f"{one}{made.suffix}" for one in names}
    found = 0.0
    for record in _records(side, made.stage, at):
        for tensor in wanted & record.tensors.keys():
            found = max(found, float(np.abs(record.tensors[tensor].astype(np.float64)).max(initial=0.0)))
    return found


def _updates(side: Side, last: At) -> list[At]:
    """Return the updates up to the last one of which gradients, states or parameters are recorded, in order."""
    kinds = ("gradient", "optimizer", "param")
    places = {_at(where.step, where.update) for kind, where in side.entries.values() if kind in kinds}
    return sorted(place for place in places if place <= last)


def _at(step: int, update: int | None) -> At:
    return step, update or 0


def _from_the_start(updates: list[At]) -> bool:
    """Return True if no update is missing: steps from 0, and the updates of each step from 0."""
    known = set(updates)
    steps = [step for step, _ in updates]
    return bool(updates) and all(
        (step, update - 1) in known if update else step == 0 or step - 1 in steps for step, update in updates
    )


@dataclass(frozen=True)
class Made:
    """One update: its direction, and the recorded tensor that it was made of: its stage and the end of its name."""

    direction: Floats
    source: Floats
    stage: str
    suffix: str = ""


def _made(
    side: Side, updates: Iterable[At], name: str, layout: ShardLayout, adam: Adam
) -> Iterable[Made | None]:
    """Yield each update, from its recorded state, else from all gradients so far; None where nothing tells."""
    first: Floats | None = np.zeros(layout.local_shape)
    second: Floats | None = np.zeros(layout.local_shape)
    beta1, beta2 = adam.betas
    for count, at in enumerate(updates, 1):
        moment, square = (_part(side, "optimizer", at, f"{name}/{key}", layout)[0] for key in STATE)
        gradient, norm = _part(side, "gradient", at, name, layout)
        if moment is not None and square is not None:
            first, second = moment, square
            yield Made(adam.direction(first, second, count), moment, "optimizer", f"/{STATE[0]}")
        elif gradient is None or first is None or second is None:
            first = second = None
            yield None
        else:
            clipped = adam.clipped(gradient, norm)
            first = beta1 * first + (1 - beta1) * clipped
            second = beta2 * second + (1 - beta2) * clipped**2
            yield Made(adam.direction(first, second, count), gradient, "gradient")


def _part(side: Side, stage: str, at: At, name: str, layout: ShardLayout) -> tuple[Floats | None, object]:
    """Return the part of a tensor that a layout takes, from all ranks that hold some, and the gradient's norm."""
    shards: list[Shard] = []
    norm: object = None
    for record in _records(side, stage, at):
        if name not in record.tensors or record.meta.get("rank_local"):
            continue
        try:
            local = local_shard(key_of(record), record, name)
        except CompareError:
            continue  # its own verdict says so
        norm = record.meta.get("grad_norm", norm)
        if local.layout.shape == layout.shape and local.array.dtype.kind not in "iub":
            shards.append(local)
    return _together(shards, layout), norm


def _together(shards: Sequence[Shard], layout: ShardLayout) -> Floats | None:
    """Return the part of a tensor that a layout takes, ``layout.local_shape``; None if shards lack some of it."""
    size = math.prod(layout.local_shape)
    found, seen = np.zeros(size), np.zeros(size, bool)
    for block in shard_blocks(Shard(found.reshape(layout.local_shape), layout), shards):
        found[block.places] = block.golden.astype(np.float64)
        seen[block.places] = True
    return found.reshape(layout.local_shape) if seen.all() else None


def _records(side: Side, stage: str, at: At) -> Iterable[Record]:
    for record, (kind, where) in side.entries.items():
        if kind == stage and _at(where.step, where.update) == at:
            yield side.read(record)
