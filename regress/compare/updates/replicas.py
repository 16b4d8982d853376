"""Agreement of ranks, bit for bit, in what several of them hold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from regress.compare.alignment.keys import Key
from regress.compare.alignment.local_shard import Overlap, Shard, local_shard, overlaps
from regress.compare.alignment.locate import Locator
from regress.compare.quantities import MICRO_STAGES, UPDATE_STAGES, source_of
from regress.compare.updates.groups import Groups
from regress.compare.verdicts.case import element
from regress.compare.verdicts.tensor import judge_tensor
from regress.compare.verdicts.tolerance import Tolerance
from regress.compare.verdicts.verdict import Place, Status, Verdict
from regress.dump.arrays import dtype_name
from regress.dump.record import Record

QUANTITY = "replicas"
SAME = Tolerance(0.0, bitwise=True, reason="ranks that hold the same element hold the same bytes")


@dataclass(frozen=True)
class Replicas:
    """The tensors of an update, rank beside rank.

    Args:
        place: place of the update.
    """

    groups: Groups
    locator: Locator
    place: Place

    def verdicts(self) -> Iterator[Verdict]:
        """Yield verdicts on elements that two ranks hold: one a stage, or one for each tensor that differs."""
        for stage in (*MICRO_STAGES, *UPDATE_STAGES):
            count, found = 0, []
            for keys in self.groups.of(stage):
                for item in self._group(keys):
                    if isinstance(item, Verdict):
                        found.append(item)
                    else:
                        count += item
            yield from found
            if count and not found:
                yield Verdict(Status.OK, QUANTITY, stage, self.place, count=count, reason=SAME.reason)

    def _group(self, keys: list[Key]) -> Iterator[Verdict | int]:
        """Yield verdicts on differing tensors of a group's records, and numbers of equal elements."""
        first, *rest = keys
        alike = [first]
        for key in rest:
            if key.stage in UPDATE_STAGES or self.groups.layout(key) == self.groups.layout(first):
                alike.append(key)
            elif key not in self.groups.placed.misfits and first not in self.groups.placed.misfits:
                yield self._elsewhere(first, key)
        for name in self.groups.names(alike):
            yield from self._compared(name, [*self.groups.held(name, alike)])
        if first.stage == "gradient":
            yield from self._compared("grad_norm", [*self._norms(alike)])

    def _compared(self, name: str, parts: list[Shard]) -> Iterator[Verdict | int]:
        differing = []
        shapes = dict.fromkeys(part.layout.shape for part in parts)
        alike = ([part for part in parts if part.layout.shape == shape] for shape in shapes)
        for overlap in (overlap for same in alike for overlap in overlaps(same)):
            if overlap.equal:
                yield int(overlap.first.size)
            elif (verdict := self._judged(name, overlap)).ok:
                yield verdict.count
            else:
                differing.append(verdict)
        if differing:
            worst = differing[0]
            pairs = len(differing) - 1
            more = f" (and {pairs} more pair{'s' if pairs > 1 else ''} of ranks)" if pairs else ""
            yield replace(worst, detail=worst.detail + more)

    def _judged(self, name: str, overlap: Overlap) -> Verdict:
        key, shape = overlap.one, overlap.shape
        source = source_of(key.stage, name)
        words = None
        if source is not None and key.stage in MICRO_STAGES:
            words = self.groups.placed.words(key, source.quantity, shape, self.locator)

        def locate(index: int) -> str:
            place = overlap.whole_index(index)
            return element(place, shape, name) if words is None else words(place)

        verdict = judge_tensor(
            overlap.second,
            overlap.first,
            SAME,
            quantity=QUANTITY,
            name=f"{key.stage}/{name}",
            place=self.place,
            mask=self._mask(key, shape, overlap),
            locate=locate,
        )
        return verdict if verdict.ok else replace(verdict, detail=_sentence(name, overlap, verdict))

    def _mask(self, key: Key, shape: tuple[int, ...], overlap: Overlap) -> NDArray[np.bool_] | None:
        """Return the mask of tokens: values that ranks compute for padding are not compared."""
        layout = self.groups.placed.layouts.get(key)
        if layout is None or key.stage in UPDATE_STAGES:
            return None
        mask = layout.attention_mask
        if shape[:2] == layout.shape:
            return mask[np.ix_(*overlap.along[:2])]
        if shape[:1] == (mask.size,):
            return mask.reshape(-1)[overlap.along[0]]
        return None

    def _elsewhere(self, one: Key, other: Key) -> Verdict:
        """Return the verdict on two ranks that should hold the same tokens, but do not."""
        offsets = self.locator.frame.offsets
        tokens = [set(self.groups.placed.layouts[key].indices(offsets)[0].tolist()) for key in (one, other)]
        odd = sorted(tokens[0] ^ tokens[1])
        where = "in other places"
        if odd:
            having, lacking = (one, other) if odd[0] in tokens[0] else (other, one)
            where = f"{self.locator.token(odd[0])} is on rank {having.rank} and not on rank {lacking.rank}"
        detail = f"the tokens of {other} do not lie as those of rank {one.rank}, which it repeats: {where}"
        return Verdict(
            Status.COVERAGE, QUANTITY, one.stage, self.place, detail, multiple=math.inf, over=len(odd)
        )

    def _norms(self, keys: Iterable[Key]) -> Iterator[Shard]:
        for key in keys:
            norm = self.groups.record(key).meta.get("grad_norm")
            if isinstance(norm, int | float):
                yield local_shard(
                    key, Record("gradient", 0, {"grad_norm": np.array(norm, np.float64)}), "grad_norm"
                )


def _sentence(name: str, overlap: Overlap, verdict: Verdict) -> str:
    one, other = overlap.one, overlap.other
    ranks = f"{name} of rank {other.rank}" if other.micro is None else f"{name} in {other}"
    if verdict.status is Status.DTYPE:
        types = [dtype_name(array.dtype) for array in (overlap.first, overlap.second)]
        return f"{ranks} is {types[1]}, that of rank {one.rank} {types[0]}"
    worst = verdict.worst
    assert worst is not None
    return (
        f"{ranks} differs from that of rank {one.rank} in {verdict.over} of {verdict.count} elements, most at "
        f"{worst.where}: {worst.actual!r} and {worst.golden!r}"
    )
