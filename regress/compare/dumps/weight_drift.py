"""Distance of the weights that two dumps begin an update with, as far as rounding made it.

Two correct layouts round otherwise, and each update passes on to the next what rounding made of the weights. Values of
an update answer to that as they do to any move of the weights, and the tolerances of the table were measured as just
that: the response to weights moved by one unit in the last place. So they grow by what the recorded weights moved.

Only what rounding explains counts, element by element and update by update: the rounding of the weights themselves,
gradients within their tolerance, and what AdamW makes of these where they are nearly zero. A wrong rate, a skipped
update or another mask moves weights further than that, and excuses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from regress.compare.alignment.local_shard import local_shard
from regress.compare.alignment.record_keys import key_of
from regress.compare.dumps.adamw_rounding import (
    Chosen,
    Made,
    Moments,
    from_the_start,
    part_of,
    records_of,
    scale_of,
    updates_of,
)
from regress.compare.dumps.adamw_settings import Adam, Floats
from regress.compare.dumps.opened_dump import Side
from regress.compare.dumps.scaled_verdicts import weight_beside
from regress.compare.dumps.tolerance_bounds import coarsest, spacing
from regress.dump.coordinates import Place
from regress.dump.numpy_arrays import dtype_name, is_float
from regress.dump.record import Record
from regress.errors import CompareError
from regress.layout import ShardLayout

ROUNDINGS = 4
"""Roundings of a weight in an update: the decay and the step, on each side, half a unit in the last place each."""
MOST = 1 << 20
"""Elements that are followed, of all parameters together, in some 100 MB; of more, as many at even distances."""
NEVER = Place(1 << 62)


@dataclass(frozen=True)
class Distance:
    """Distance of the weights that an update began with.

    Attributes:
        relative: norm of the difference of a parameter over the parameter's own, the largest of all.
        name: that parameter.
    """

    relative: float
    name: str


Relative = Callable[[float], Mapping[str, float]]
"""Function of the weights' distance: tolerances of ``gradient`` and ``optimizer``, relative to the largest value."""


def weight_distances(sides: tuple[Side, Side], relative: Relative) -> dict[Place, Distance]:
    """Return the distance of the weights that each update began with, by the golden step and update.

    Updates after one whose parameters are not recorded on both sides have none, nor has the first.
    """
    known = [updates_of(side, NEVER) for side in sides]
    shared = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(*known, strict=False))]
    found: dict[Place, Distance] = {}
    weights = _Weights(sides)
    distance = Distance(0.0, "")
    for number, at in enumerate(shared):
        if not from_the_start(shared[: number + 1]) or (number and distance.name == ""):
            break
        if number:
            found[at] = distance
        if at == shared[-1]:
            break  # no update begins with what it leaves
        moved = weights.update(at, relative(distance.relative))
        if moved is None:
            break
        distance = moved
    return found


@dataclass
class _Part:
    """Elements of a parameter that one rank holds, and what is known of them so far.

    Attributes:
        stands_for: number of elements for which each of them stands.
    """

    chosen: Chosen
    stands_for: float
    moments: tuple[Moments, Moments]
    sum: NDArray[np.float32]
    before: tuple[Floats, Floats] | None = None


@dataclass
class _Weights:
    """The parameters of both sides, update by update."""

    sides: tuple[Side, Side]
    parts: dict[str, list[_Part]] = field(default_factory=dict)

    def update(self, at: Place, relative: Mapping[str, float]) -> Distance | None:
        """Return the distance of the weights after an update; None if they are not recorded on both sides."""
        records = [
            {
                record_type: [*records_of(side, record_type, at)]
                for record_type in ("param", "gradient", "optimizer")
            }
            for side in self.sides
        ]
        layouts = _layouts(records[1]["param"])
        count = sum(int(np.prod(one.local_shape)) for several in layouts.values() for one in several)
        if not layouts or (self.parts and self.parts.keys() - layouts.keys()):
            return None
        stride = -(-count // MOST)
        norms: dict[str, tuple[float, float]] = {}
        for name, several in layouts.items():
            parts = self.parts.setdefault(name, [_begin(one, stride) for one in several])
            moved = size = 0.0
            for part in parts:
                both = [part_of(own["param"], name, part.chosen)[0] for own in records]
                if both[0] is None or both[1] is None:
                    return None
                weights = both[0], both[1]
                part.sum += self._explained(part, name, weights, records, relative)
                part.before = weights
                moved += part.stands_for * float(np.square(part.sum, dtype=np.float64).sum())
                size += part.stands_for * float(np.square(weights[0]).sum())
            norms[name] = moved, size
        return _largest(norms)

    def _explained(
        self,
        part: _Part,
        name: str,
        weights: tuple[Floats, Floats],
        records: Sequence[Mapping[str, Sequence[Record]]],
        relative: Mapping[str, float],
    ) -> Floats:
        """Return by how much the update moved the weights of the two sides apart, as far as rounding explains it."""
        golden, actual = weights
        steps = None if part.before is None else (golden - part.before[0], actual - part.before[1])
        apart = actual - golden if steps is None else steps[1] - steps[0]
        unit = spacing(_dtype(name, [record for own in records for record in own["param"]]))
        bound = 0.5 * ROUNDINGS * unit * np.maximum(np.abs(golden), np.abs(actual))
        rates, made = self._made(part, name, records)
        for record_type in ("optimizer", "gradient"):
            one, other = (found.get(record_type) for found in made)
            if one is None or other is None:
                continue
            far = relative[record_type] * scale_of(records[0][record_type], one, name)
            alike = np.abs(one.source - other.source) <= far
            bound += np.where(alike, min(rates) * np.abs(one.direction - other.direction), 0.0)
            break
        if steps is not None:
            bound += relative["gradient"] * float(np.abs(steps[0]).max(initial=0.0))
        return np.clip(apart, -bound, bound)

    def _made(
        self, part: _Part, name: str, records: Sequence[Mapping[str, Sequence[Record]]]
    ) -> tuple[list[float], list[Mapping[str, Made]]]:
        """Return learning rate and update of each side by AdamW; nothing for another optimizer."""
        configured = Adam.of(self.sides[0].config) or Adam.of(self.sides[1].config)
        rates, made = [], []
        for moments, own in zip(part.moments, records, strict=True):
            settings = (Adam.recorded(record.meta, name) for record in own["optimizer"])
            adam = configured or next((one for one in settings if one is not None), None)
            if adam is None:
                return [], [{}, {}]
            rates.append(adam.rate)
            made.append(moments.next(adam, name, own["gradient"], own["optimizer"]))
        return rates, made


def _begin(layout: ShardLayout, stride: int) -> _Part:
    """Return the part of a layout with one element of each `stride`, at random in it, as matrices have columns."""
    size = int(np.prod(layout.local_shape))
    places = np.arange(0, size, stride)
    if stride > 1:
        places = np.minimum(places + np.random.default_rng(0).integers(0, stride, places.size), size - 1)
    chosen = Chosen(layout, places)
    moments = Moments(chosen), Moments(chosen)
    return _Part(chosen, size / max(places.size, 1), moments, np.zeros(places.size, np.float32))


def _layouts(records: Sequence[Record]) -> dict[str, list[ShardLayout]]:
    """Return the parts of each floating parameter that ranks hold, each once."""
    found: dict[str, list[ShardLayout]] = {}
    for record in records:
        for name, array in record.tensors.items():
            if not is_float(array.dtype) or record.meta.get("rank_local"):
                continue
            try:
                layout = local_shard(key_of(record), record, name).layout
            except CompareError:
                continue  # its own verdict says so
            several = found.setdefault(name, [])
            if layout not in several:
                several.append(layout)
    return found


def _dtype(name: str, records: Sequence[Record]) -> str:
    return coarsest([dtype_name(record.tensors[name].dtype) for record in records if name in record.tensors])


def _largest(norms: Mapping[str, tuple[float, float]]) -> Distance:
    """Return the largest relative distance; a bias has at least the size of its weight, beside whose product it is."""
    found = Distance(0.0, next(iter(norms)))
    for name, (moved, size) in norms.items():
        beside = norms.get(weight_beside(name) or "", (0.0, 0.0))[1]
        whole = max(size, beside)
        if whole and (relative := float(np.sqrt(moved / whole))) > found.relative:
            found = replace(found, relative=relative, name=name)
    return found


def spread(found: Mapping[Place, Distance]) -> Iterator[str]:
    """Yield the notes on the distances that were needed."""
    if found:
        first, last = min(found), max(found)
        worst = max(found.values(), key=lambda one: one.relative)
        steps = f"step {first.step}" if first.step == last.step else f"steps {first.step} to {last.step}"
        yield (
            f"{steps}: weights that differ before the update by {worst.relative:.2g} of their size ({worst.name}) are "
            "what rounding and AdamW make of earlier updates, and tolerances of what was computed with them are wider "
            "by the response to that"
        )
