"""What several ranks hold: every element of a tensor is on some rank, and is the same on all that have it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from regress.compare.align import Key
from regress.compare.coverage import QUANTITY as COVERAGE
from regress.compare.held import Held, Overlap, held, others, overlaps, uncovered
from regress.compare.locate import Locator
from regress.compare.placed import PlacedRecords
from regress.compare.plan import Plan
from regress.compare.quantities import MICRO_STAGES, OPEN_STAGES, UPDATE_STAGES, source_of
from regress.compare.tensor import element, judge_tensor
from regress.compare.tolerance import Tolerance
from regress.compare.verdict import Place, Status, Verdict
from regress.dump.arrays import Array, dtype_name
from regress.dump.record import Record
from regress.errors import CompareError

QUANTITY = "replicas"
SAME = Tolerance(0.0, bitwise=True, reason="ranks that hold the same element hold the same bytes")


@dataclass(frozen=True)
class Replicas:
    """The tensors of an update, rank beside rank.

    Args:
        place: of the update.
    """

    placed: PlacedRecords
    plan: Plan
    locator: Locator
    place: Place

    def verdicts(self) -> Iterator[Verdict]:
        """Whatever two ranks hold in common: one verdict a stage, or one for each tensor that differs."""
        for stage in (*MICRO_STAGES, *UPDATE_STAGES):
            count, found = 0, []
            for keys in self._groups(stage).values():
                for item in self._group(keys):
                    if isinstance(item, Verdict):
                        found.append(item)
                    else:
                        count += item
            yield from found
            if count and not found:
                yield Verdict(Status.OK, QUANTITY, stage, self.place, count=count, reason=SAME.reason)

    def coverage(self, golden: Mapping[str, Mapping[str, Array]]) -> Iterator[Verdict]:
        """Whether some rank holds each element: of the golden tensors of an update, and of each microbatch's outputs.

        Args:
            golden: ``stage -> tensor name -> golden values`` of the stages whose tensors have names of their own.
        """
        for stage in OPEN_STAGES:
            names = golden.get(stage, {})
            groups = self._groups(stage)
            if not names or not groups or not self._several(groups.values()):
                continue
            recorded = {
                name for keys in groups.values() for key in keys for name in self._record(key).tensors
            }
            lost = [name for name in names if name not in recorded] if self.plan.divided else []
            found = [v for keys in groups.values() for v in self._covered(stage, keys, names)]
            found += [self._lost(stage, name) for name in lost]
            yield from found
            if not found and stage in UPDATE_STAGES:
                elements = sum(math.prod(array.shape) for array in names.values())
                yield Verdict(Status.OK, COVERAGE, stage, self.place, count=elements)

    def _several(self, groups: Iterable[list[Key]]) -> bool:
        """Whether there is more to say than that one rank holds it all."""
        shards = (self._record(key).meta.get("shards") for keys in groups for key in keys)
        return len(self.plan.ranks) > 1 or any(shards)

    def _groups(self, stage: str) -> dict[tuple[int | None, int | None], list[Key]]:
        """Records that belong together, ascending by rank: those of the same tokens, or all of an update."""
        found: dict[tuple[int | None, int | None], list[Key]] = {}
        for key in sorted(self.placed.of_stages([stage]), key=lambda key: (key.micro or 0, key.rank or 0)):
            whole = stage in UPDATE_STAGES
            found.setdefault((None, None) if whole else (self.plan.root(key.rank), key.micro), []).append(key)
        return found

    def _group(self, keys: list[Key]) -> Iterator[Verdict | int]:
        """Verdicts on what the records of a group have in common, and the numbers of elements that are the same."""
        first, *rest = keys
        alike = [first]
        for key in rest:
            if key.stage in UPDATE_STAGES or self._layouts(key) == self._layouts(first):
                alike.append(key)
            elif key not in self.placed.misfits and first not in self.placed.misfits:
                yield self._elsewhere(first, key)
        for name in dict.fromkeys(name for key in alike for name in self._record(key).tensors):
            yield from self._compared(name, [*self._held(name, alike)])
        if first.stage == "gradient":
            yield from self._compared("grad_norm", [*self._norms(alike)])

    def _compared(self, name: str, parts: list[Held]) -> Iterator[Verdict | int]:
        differing = []
        for overlap in overlaps([part for part in parts if part.layout.shape == parts[0].layout.shape]):
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
            words = self.placed.words(key, source.quantity, shape, self.locator)

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
        """Where tokens lie: what ranks compute of padding belongs to nobody."""
        layout = self.placed.layouts.get(key)
        if layout is None or key.stage in UPDATE_STAGES:
            return None
        mask = layout.attention_mask
        if shape[:2] == layout.shape:
            return mask[np.ix_(*overlap.along[:2])]
        if shape[:1] == (mask.size,):
            return mask.reshape(-1)[overlap.along[0]]
        return None

    def _elsewhere(self, one: Key, other: Key) -> Verdict:
        """Two ranks that should hold the same tokens, but do not."""
        offsets = self.locator.frame.offsets
        tokens = [set(self.placed.layouts[key].indices(offsets)[0].tolist()) for key in (one, other)]
        odd = sorted(tokens[0] ^ tokens[1])
        where = "in other places"
        if odd:
            having, lacking = (one, other) if odd[0] in tokens[0] else (other, one)
            where = f"{self.locator.token(odd[0])} is on rank {having.rank} and not on rank {lacking.rank}"
        detail = f"the tokens of {other} do not lie as those of rank {one.rank}, which it repeats: {where}"
        return Verdict(
            Status.COVERAGE, QUANTITY, one.stage, self.place, detail, multiple=math.inf, over=len(odd)
        )

    def _covered(self, stage: str, keys: list[Key], golden: Mapping[str, Array]) -> Iterator[Verdict]:
        if len({self._layouts(key) for key in keys}) > 1:
            return  # what lies elsewhere is no part of the same, and a verdict on replicas
        for name, values in golden.items():
            parts = [*self._held(name, keys)]
            if not parts:
                continue  # that nobody holds it, or in another shape, is a verdict of its own
            shape = values.shape if stage in UPDATE_STAGES else parts[0].layout.shape
            missing = uncovered(shape, (part.layout for part in parts if part.layout.shape == shape))
            if missing is not None:
                yield self._free(f"{stage}/{name}", name, keys[0], shape, missing)

    def _lost(self, stage: str, name: str) -> Verdict:
        return Verdict(Status.MISSING, COVERAGE, f"{stage}/{name}", self.place, f"no rank holds {name}")

    def _free(
        self, label: str, name: str, key: Key, shape: tuple[int, ...], missing: tuple[int, int]
    ) -> Verdict:
        count, index = missing
        words = None
        if key.stage in MICRO_STAGES:
            words = self.placed.words(key, key.stage, shape, self.locator)
        where = element(index, shape, name) if words is None else f"{words(index)} of {name}"
        return Verdict(
            Status.COVERAGE,
            COVERAGE,
            label,
            self.place,
            detail=f"{where} is held by no rank{others(count)}",
            multiple=math.inf,
            over=count,
            count=math.prod(shape),
            reason="each element of a tensor is held by some rank",
        )

    def _held(self, name: str, keys: Iterable[Key]) -> Iterator[Held]:
        """What ranks hold of a tensor; shards that cannot be understood are a verdict at their place."""
        for key in keys:
            record = self._record(key)
            if name in record.tensors:
                try:
                    yield held(key, record, name)
                except CompareError:
                    continue

    def _norms(self, keys: Iterable[Key]) -> Iterator[Held]:
        for key in keys:
            norm = self._record(key).meta.get("grad_norm")
            if isinstance(norm, int | float):
                yield held(key, Record("gradient", 0, {"grad_norm": np.array(norm, np.float64)}), "grad_norm")

    def _layouts(self, key: Key) -> object:
        layout = self.placed.layouts.get(key)
        return None if layout is None else (layout, self.placed.rows(key))

    def _record(self, key: Key) -> Record:
        record = self.placed.get(key)
        assert record is not None
        return record


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
