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
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from regress.compare.alignment.keys import key_of
from regress.compare.alignment.local_shard import local_shard
from regress.compare.dumps.shard_overlap import Shard, shard_blocks
from regress.compare.dumps.sides import Side
from regress.compare.verdicts.verdict import Place
from regress.dump.arrays import Array
from regress.dump.record import Record
from regress.errors import CompareError
from regress.layout import ShardLayout

Floats: TypeAlias = NDArray[np.float64]
At: TypeAlias = tuple[int, int]
"""Step, and update within it."""
CLIP_EPS = 1e-6
"""Added to the norm by ``torch.nn.utils.clip_grad_norm_``."""
FEW = 0.1
"""Largest part of a tensor that near-zero gradients may hold: a wrong update moves more of it."""


@dataclass(frozen=True)
class Adam:
    """Settings of AdamW, as a run's configuration tells them."""

    rate: float
    betas: tuple[float, float]
    eps: float
    max_norm: float | None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Adam | None:
        """Return the settings; None if the configuration does not tell them, or names another optimizer."""
        told = config.get("optimizer")
        if (
            not isinstance(told, Mapping)
            or told.get("factory") is not None
            or told.get("state_path") is not None
        ):
            return None
        betas, numbers = told.get("betas"), [told.get("learning_rate"), told.get("eps")]
        if not isinstance(betas, list | tuple) or len(betas) != 2:
            return None
        known = [number for number in (*numbers, *betas) if isinstance(number, int | float)]
        if len(known) < 4 or not all(math.isfinite(number) and number >= 0 for number in known):
            return None
        if max(known[2:]) >= 1:
            return None
        norm = told.get("max_grad_norm")
        limit = float(norm) if isinstance(norm, int | float) else None
        return cls(float(known[0]), (float(known[2]), float(known[3])), float(known[1]), limit)

    @property
    def most(self) -> float:
        """Most that an update moves an element, whatever its gradients (Kingma & Ba, 1412.6980, section 2.1)."""
        beta1, beta2 = self.betas
        return self.rate * max(1.0, (1 - beta1) / math.sqrt(1 - beta2))

    def direction(self, first: Floats, second: Floats, count: int) -> Floats:
        """Return the update over the learning rate, from the moments after ``count`` updates."""
        beta1, beta2 = self.betas
        root = np.sqrt(second / (1 - beta2**count)) + self.eps
        with np.errstate(divide="ignore", invalid="ignore"):
            found = first / (1 - beta1**count) / root
        return np.where(root > 0, found, 0.0)

    def clipped(self, gradient: Floats, norm: object) -> Floats:
        """Return a gradient as the optimizer gets it, scaled down to the largest norm."""
        if self.max_norm is None or not isinstance(norm, int | float) or not math.isfinite(norm):
            return gradient
        return gradient * min(1.0, self.max_norm / (norm + CLIP_EPS))


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
        place: Place,
        name: str,
        actual: Shard,
        golden: Sequence[Shard],
        bound: float,
    ) -> Updated:
        """Compare a parameter with what AdamW makes of the recorded gradients.

        Args:
            bound: tolerance of the parameter, which rounding may add.
        """
        here, layout = actual.array.astype(np.float64), actual.layout
        there = _together(golden, layout)
        if there is None or not np.isfinite(here).all() or not np.isfinite(there).all():
            return cls()
        found = difference(*sides, (place.step or 0, place.update or 0), name, layout)
        error = np.abs(here - there)
        if found.allowed is None:
            return cls(doubt=_doubt(name, place, error, bound) if found.undecided(error, bound) else "")
        settled = (error > bound) & (found.allowed > 0) & (error <= found.allowed + bound)
        if not settled.any():
            return cls()
        much = f"{int(settled.sum())} of {error.size} elements"
        note = (
            f"param {name}: {much} differ beyond the tolerance, by {error[settled].max():.2g} at most, and by no more "
            "than AdamW makes of the gradients recorded for them, which are nearly zero: they count as equal"
        )
        return cls(np.where(settled, there.astype(actual.array.dtype), actual.array), note)


def _doubt(name: str, place: Place, error: Floats, bound: float) -> str:
    return (
        f"{place}: param {name}: {int((error > bound).sum())} of {error.size} elements are off by "
        f"{error.max():.2g} at most, as far as AdamW may move them apart where gradients are nearly zero, and nothing "
        "tells whether it did: record gradient (or optimizer) of every update from the first on in both dumps, or "
        "give --rtol and --atol"
    )


def difference(golden: Side, actual: Side, at: At, name: str, layout: ShardLayout) -> Difference:
    """Return how far apart AdamW moves a parameter, given what both sides recorded of each update up to one.

    Args:
        at: the update after which the parameter was recorded.
        layout: part of the parameter that is compared.
    """
    adam = Adam.of(golden.config) or Adam.of(actual.config)
    if adam is None:
        return Difference()
    updates = [_updates(side, at) for side in (golden, actual)]
    limit = 2 * adam.most * (at[0] + 1) * (1 + max((update for _, update in updates[0]), default=at[1]))
    if updates[0] != updates[1] or not _from_the_start(updates[0]):
        return Difference(limit=limit)
    allowed = np.zeros(layout.local_shape)
    runs = [_directions(side, updates[0], name, layout, adam) for side in (golden, actual)]
    for first, second in zip(*runs, strict=True):
        if first is None or second is None:
            return Difference(limit=limit)
        allowed += adam.rate * np.abs(first - second)
    return Difference(allowed, limit)


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


def _directions(
    side: Side, updates: Iterable[At], name: str, layout: ShardLayout, adam: Adam
) -> Iterable[Floats | None]:
    """Yield the direction of each update, from its recorded state, else from all gradients so far."""
    first: Floats | None = np.zeros(layout.local_shape)
    second: Floats | None = np.zeros(layout.local_shape)
    beta1, beta2 = adam.betas
    for count, at in enumerate(updates, 1):
        states = [
            _part(side, "optimizer", at, f"{name}/{key}", layout)[0] for key in ("exp_avg", "exp_avg_sq")
        ]
        if states[0] is not None and states[1] is not None:
            first, second = states
        else:
            gradient, norm = _part(side, "gradient", at, name, layout)
            if gradient is None or first is None or second is None:
                first = second = None
            else:
                gradient = adam.clipped(gradient, norm)
                first = beta1 * first + (1 - beta1) * gradient
                second = beta2 * second + (1 - beta2) * gradient**2
        yield None if first is None or second is None else adam.direction(first, second, count)


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
            shards.append(Shard(local.array, local.layout))
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
