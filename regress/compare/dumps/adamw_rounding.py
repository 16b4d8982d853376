"""Parameter differences that AdamW makes of recorded gradients: it divides a gradient by its own size.

Where a gradient is as small as its rounding, two correct runs may move a parameter by the learning rate in opposite
directions. The recorded gradients, or optimizer states, of both sides tell that element by element: AdamW is applied
to those of each side, and what the two make of them is not a fault of the update. A wrong rate, a skipped update or a
turned sign differ where the gradients agree, too, so they stay beyond every bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from regress.compare.alignment.aligned_tensor import Aligned
from regress.compare.alignment.local_shard import Shard, local_shard
from regress.compare.alignment.record_keys import key_of
from regress.compare.alignment.shard_overlap import shard_blocks
from regress.compare.alignment.token_overlap import BLOCK, Index
from regress.compare.dumps.adamw_settings import STATE, Adam, Floats
from regress.compare.dumps.opened_dump import Side
from regress.compare.dumps.record_listing import record_of
from regress.compare.dumps.scaled_verdicts import Finding, weight_beside
from regress.compare.dumps.unit_work import UnitWork
from regress.compare.quantities import QuantitySource
from regress.compare.verdicts.verdict import Status
from regress.dump.coordinates import Place
from regress.dump.mapped_arrays import release
from regress.dump.numpy_arrays import Array
from regress.dump.record import Record
from regress.errors import CompareError
from regress.layout import ShardLayout

FEW = 0.1
"""Largest part of a tensor that near-zero gradients may hold: a wrong update moves more of it."""


MOST = 1 << 22
"""Most elements beyond the tolerance that are examined; the float64 copies of more would need too much memory."""


@dataclass(frozen=True)
class Difference:
    """Most that the updates so far can have moved a parameter apart.

    Attributes:
        allowed: for each element asked for, from recorded gradients or states; None where they are not recorded.
        limit: for any element, whatever its gradients; None where the optimizer is unknown.
    """

    allowed: Floats | None = None
    limit: float | None = None

    def undecided(self, error: Floats, bound: float, size: int) -> bool:
        """Return True if nothing tells a wrong update from near-zero gradients: few elements are off, and by little.

        Args:
            error: of the elements beyond the bound, out of ``size``.
        """
        few = error.size <= max(1, int(FEW * size))
        return self.limit is not None and few and bool((error <= self.limit + bound).all())


@dataclass(frozen=True)
class AdamWRounding:
    """Parameters, which AdamW moves either way where their gradients are as small as rounding."""

    work: UnitWork

    def admit(self, source: QuantitySource, finding: Finding, found: Aligned) -> Finding:
        """Return the finding on a parameter without the differences that recorded gradients or states explain.

        Where nothing is recorded that would tell, the finding says why it is inconclusive.
        """
        if finding.verdict.status is not Status.DRIFT or "multiple" not in finding.tolerance.basis:
            return finding
        work, records, name = self.work, self.work.records, source.tensor
        actual = local_shard(key_of(records.actual), records.actual, name)
        golden = [one for one in work.golden_shards(source) if one.layout.shape == actual.layout.shape]
        bound, size = finding.verdict.tolerance, actual.array.size
        beyond = _beyond(actual, golden, bound)
        if beyond is None:
            return finding
        places, error, there = beyond
        sides = records.golden_side, records.actual_side
        record = next(own for own, one in records.golden.items() if name in one.tensors)
        names = record, work.unit.record
        own, other = (side.entries[one][1] for side, one in zip(sides, names, strict=True))
        relative = {
            record_type: work.tolerance_of(record_type, golden[0].array, actual.array).relative
            for record_type in ("gradient", "optimizer")
        }
        adam = Adam.of(sides[0].config) or Adam.of(sides[1].config)
        at = own.of_update.counted, other.of_update.counted
        explained = difference(sides, adam, at, name, Chosen(actual.layout, places), relative)
        if explained.allowed is None:
            undecided = explained.undecided(error, bound, size)
            words = _inconclusive(name, work.unit.place, error, size) if undecided else ""
            return replace(finding, inconclusive=words)
        settled = (explained.allowed > 0) & (error <= explained.allowed + bound)
        if not settled.any():
            return finding
        note = (
            f"param {name}: {int(settled.sum())} of {size} elements differ beyond the tolerance, by "
            f"{error[settled].max():.2g} at most, and by no more than AdamW makes of the gradients recorded on both "
            "sides, each divided by its own size: they count as equal"
        )
        closer = actual.array.copy()
        closer.reshape(-1)[places[settled]] = there[settled].astype(closer.dtype)
        anew = work.judged(source, work.beside(source, replace(actual, array=closer), golden))
        return replace(anew, note=note)


def _beyond(actual: Shard, golden: Sequence[Shard], bound: float) -> tuple[Index, Floats, Floats] | None:
    """Return flat places, errors and golden values of the elements beyond a bound.

    None if they are too many, if one is not finite, or if some elements have no golden value.
    """
    places: list[Index] = []
    errors: list[Floats] = []
    values: list[Floats] = []
    seen = count = 0
    for at, here, there in _stripes(actual, golden):
        seen += here.size
        error = np.abs(here.astype(np.float64) - there.astype(np.float64))
        over = np.flatnonzero(~(error <= bound))
        count += over.size
        if count > MOST or not np.isfinite(error[over]).all():
            return None
        places.append(over + at if isinstance(at, int) else at[over])
        errors.append(error[over])
        values.append(there[over].astype(np.float64))
    if seen < actual.array.size or not count:
        return None
    return np.concatenate(places), np.concatenate(errors), np.concatenate(values)


def _stripes(actual: Shard, golden: Sequence[Shard]) -> Iterator[tuple[Index | int, Array, Array]]:
    """Yield the elements of a shard beside their golden values, few at once: their place or places, and both."""
    for block in shard_blocks(actual, golden):
        places = block.places
        for start in range(0, block.actual.size, BLOCK):
            here = slice(start, start + BLOCK)
            at = places.start + start if isinstance(places, slice) else places[here]
            yield at, block.actual[here], block.golden[here]
            release(block.actual[here])
            release(block.golden[here])


@dataclass(frozen=True, eq=False)
class Chosen:
    """Elements of the part of a tensor that a layout takes, by their flat places in it, in order."""

    layout: ShardLayout
    places: Index

    def values(self, shards: Sequence[Shard]) -> Floats | None:
        """Return their values; None if the shards lack one."""
        found, seen = np.zeros(self.places.size), np.zeros(self.places.size, bool)
        nothing = np.broadcast_to(np.zeros((), np.uint8), self.layout.local_shape)
        for at, _, values in _stripes(Shard(nothing, self.layout), shards):
            if isinstance(at, int):
                run = slice(*np.searchsorted(self.places, (at, at + values.size)).tolist())
                found[run], seen[run] = values[self.places[run] - at].astype(np.float64), True
            else:
                _, own, of = np.intersect1d(self.places, at, assume_unique=True, return_indices=True)
                found[own], seen[own] = values[of].astype(np.float64), True
        return found if seen.all() else None


def _inconclusive(name: str, place: Place, error: Floats, size: int) -> str:
    return (
        f"{place}: param {name}: {error.size} of {size} elements are off by "
        f"{error.max():.2g} at most, as far as AdamW may move them apart where gradients are nearly zero, and nothing "
        "tells whether it did: record gradient (or optimizer) of every update from the first on in both dumps, or "
        "give --rtol and --atol"
    )


def difference(
    sides: tuple[Side, Side],
    adam: Adam | None,
    at: tuple[Place, Place],
    name: str,
    chosen: Chosen,
    relative: Mapping[str, float],
) -> Difference:
    """Return how far apart AdamW moves a parameter, given what both sides recorded of each update up to one.

    Gradients that differ by more than their own tolerance explain nothing: they are the fault.

    Args:
        adam: settings of all updates; None: those that each record of the states tells of its own.
        at: the update after which each side recorded the parameter.
        chosen: elements of the parameter that are asked for.
        relative: tolerance of ``gradient`` and ``optimizer``, relative to the largest golden value.
    """
    golden, actual = (updates_of(side, last) for side, last in zip(sides, at, strict=True))
    limit = None
    if adam is not None:
        updates = 1 + max((place.update or 0 for place in golden), default=at[0].update or 0)
        limit = 2 * adam.most * ((at[0].step or 0) + 1) * updates
    if len(golden) != len(actual) or not from_the_start(golden) or not from_the_start(actual):
        return Difference(limit=limit)
    allowed = np.zeros(chosen.places.size)
    known = [_settings(side, own, name, adam) for side, own in zip(sides, (golden, actual), strict=True)]
    if any(one is None for both in known for one in both):
        return Difference(limit=limit)
    runs = [
        _made(side, own, name, chosen, settings)
        for side, own, settings in zip(sides, (golden, actual), known, strict=True)
    ]
    for place, settings, one, other in zip(golden, zip(*known, strict=True), *runs, strict=True):
        rate = min(own.rate for own in settings if own is not None)
        record_type = next(
            (
                record_type
                for record_type in ("optimizer", "gradient")
                if record_type in one and record_type in other
            ),
            None,
        )
        if record_type is None:
            return Difference(limit=limit)
        first, second = one[record_type], other[record_type]
        bound = relative[first.record_type] * scale_of(
            records_of(sides[0], first.record_type, place), first, name
        )
        alike = np.abs(first.source - second.source) <= bound
        allowed += np.where(alike, rate * np.abs(first.direction - second.direction), 0.0)
    return Difference(allowed, limit)


def scale_of(records: Iterable[Record], made: Made, name: str) -> float:
    """Return the largest value of a tensor on any rank; of a bias at least that of its weight, whose terms it sums."""
    names = {f"{one}{made.suffix}" for one in (name, weight_beside(name)) if one is not None}
    found = 0.0
    for record in records:
        for tensor in names & record.tensors.keys():
            array = record.tensors[tensor]
            if array.size:
                found = max(found, float(array.max()), -float(array.min()))
                release(array)
    return found


def updates_of(side: Side, last: Place) -> list[Place]:
    """Return the updates up to the last one of which gradients, states or parameters are recorded, in order."""
    kinds = ("gradient", "optimizer", "param")
    places = {where.of_update.counted for kind, where in side.entries.values() if kind in kinds}
    return sorted(place for place in places if not last < place)


def from_the_start(updates: list[Place]) -> bool:
    """Return True if no update is missing: steps from 0, and the updates of each step from 0."""
    known = set(updates)
    steps = {0, *((place.step or 0) + 1 for place in updates)}
    return bool(updates) and all(
        replace(place, update=place.update - 1) in known if place.update else place.step in steps
        for place in updates
    )


@dataclass(frozen=True)
class Made:
    """One update: its direction, and the recorded tensor that it was made of: its type and the end of its name."""

    direction: Floats
    source: Floats
    record_type: str
    suffix: str = ""


def _settings(side: Side, updates: Iterable[Place], name: str, configured: Adam | None) -> list[Adam | None]:
    """Return the settings of each update: those given for all, else those of its record of the states."""
    if configured is not None:
        return [configured for _ in updates]
    return [
        next((own for r in records_of(side, "optimizer", at) if (own := Adam.recorded(r.meta, name))), None)
        for at in updates
    ]


def _made(
    side: Side, updates: Iterable[Place], name: str, chosen: Chosen, settings: Iterable[Adam | None]
) -> Iterable[Mapping[str, Made]]:
    """Yield each update as its recorded state makes it, and as all gradients so far do, by type; what is recorded."""
    moments = Moments(chosen)
    for at, adam in zip(updates, settings, strict=True):
        assert adam is not None
        yield moments.next(
            adam, name, *([*records_of(side, record_type, at)] for record_type in ("gradient", "optimizer"))
        )


class Moments:
    """The moments of some elements of a parameter, update by update: as they are recorded, or made of all gradients."""

    def __init__(self, chosen: Chosen) -> None:
        self._chosen = chosen
        self._first: Floats | None = np.zeros(chosen.places.size)
        self._second: Floats | None = np.zeros(chosen.places.size)
        self._count = 0

    def next(
        self, adam: Adam, name: str, gradients: Sequence[Record], states: Sequence[Record]
    ) -> Mapping[str, Made]:
        """Return the next update by what it was made of: gradients, moments, or both; what is recorded.

        Args:
            gradients, states: records of the gradients and of the optimizer's state, of all ranks.
        """
        self._count += 1
        beta1, beta2 = adam.betas
        found: dict[str, Made] = {}
        moment, square = (part_of(states, f"{name}/{key}", self._chosen)[0] for key in STATE)
        gradient, norm = part_of(gradients, name, self._chosen)
        if gradient is None or self._first is None or self._second is None:
            self._first = self._second = None
        else:
            clipped = adam.clipped(gradient, norm)
            self._first = beta1 * self._first + (1 - beta1) * clipped
            self._second = beta2 * self._second + (1 - beta2) * clipped**2
            direction = adam.direction(self._first, self._second, self._count)
            found["gradient"] = Made(direction, gradient, "gradient")
        if moment is not None and square is not None:
            self._first, self._second = moment, square
            direction = adam.direction(moment, square, self._count)
            found["optimizer"] = Made(direction, moment, "optimizer", f"/{STATE[0]}")
        return found


def part_of(records: Iterable[Record], name: str, chosen: Chosen) -> tuple[Floats | None, object]:
    """Return the chosen elements of a tensor, from all records that hold some, and the gradient's norm."""
    shards: list[Shard] = []
    norm: object = None
    for record in records:
        if name not in record.tensors or record.meta.get("rank_local"):
            continue
        try:
            local = local_shard(key_of(record), record, name)
        except CompareError:
            continue  # its own verdict says so
        norm = record.meta.get("grad_norm", norm)
        if local.layout.shape == chosen.layout.shape and local.array.dtype.kind not in "iub":
            shards.append(local)
    return chosen.values(shards), norm


def records_of(side: Side, record_type: str, at: Place) -> Iterable[Record]:
    for record, (kind, where) in side.entries.items():
        if kind == record_type and where.of_update.counted == at:
            yield record_of(side, record)
