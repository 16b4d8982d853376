"""Agreement of ranks, bit for bit, in what several of them hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from regress.compare.alignment.aligned_tensor import Aligned, TokenRows, judge_aligned
from regress.compare.alignment.element_names import Locator
from regress.compare.alignment.local_shard import Shard, whole_layout
from regress.compare.alignment.record_keys import Key, norm_of
from regress.compare.alignment.shard_overlap import equal_elements, pairs, shard_blocks, words_of
from regress.compare.alignment.token_overlap import token_part
from regress.compare.quantities import MICRO_TYPES, UPDATE_TYPES, source_of
from regress.compare.update_records import Records
from regress.compare.verdicts.tensor_case import Case, Locate, element
from regress.compare.verdicts.tolerance import Tolerance
from regress.compare.verdicts.verdict import Status, Verdict
from regress.dump.coordinates import Place
from regress.dump.numpy_arrays import dtype_name

QUANTITY = "replicas"
SAME = Tolerance(0.0, bitwise=True, reason="ranks that hold the same element hold the same bytes")


@dataclass(frozen=True)
class Replicas:
    """The tensors of an update, rank beside rank.

    Args:
        place: place of the update.
    """

    records: Records
    locator: Locator
    place: Place

    def verdicts(self) -> Iterator[Verdict]:
        """Yield verdicts on elements that two ranks hold: one a record type, or one for each tensor that differs."""
        for record_type in (*MICRO_TYPES, *UPDATE_TYPES):
            count, found = 0, []
            for keys in self.records.groups(record_type):
                for item in self._group(keys):
                    if isinstance(item, Verdict):
                        found.append(item)
                    else:
                        count += item
            yield from found
            if count and not found:
                yield Verdict(Status.OK, QUANTITY, record_type, self.place, count=count, reason=SAME.reason)

    def _group(self, keys: list[Key]) -> Iterator[Verdict | int]:
        """Yield verdicts on differing tensors of a group's records, and numbers of equal elements."""
        first, *rest = keys
        alike = [first]
        for key in rest:
            if key.record_type in UPDATE_TYPES or self.records.alike(key, first):
                alike.append(key)
            elif key not in self.records.misfits and first not in self.records.misfits:
                yield self._elsewhere(first, key)
        for name in self.records.names(alike):
            yield from self._compared(name, [*self.records.shards(name, alike)])
        if first.record_type == "gradient":
            yield from self._compared("grad_norm", [*self._norms(alike)])

    def _compared(self, name: str, parts: list[Shard]) -> Iterator[Verdict | int]:
        differing = []
        shapes = dict.fromkeys(part.layout.shape for part in parts)
        alike = ([part for part in parts if part.layout.shape == shape] for shape in shapes)
        for one, other in (pair for same in alike for pair in pairs(same)):
            count = equal_elements(one, other)
            if count is not None:
                yield count
            elif (verdict := self._judged(name, one, other)).ok:
                yield verdict.count
            else:
                differing.append(verdict)
        if differing:
            worst = differing[0]
            rest = len(differing) - 1
            more = f" (and {rest} more pair{'s' if rest > 1 else ''} of ranks)" if rest else ""
            yield replace(worst, detail=worst.detail + more)

    def _judged(self, name: str, one: Shard, other: Shard) -> Verdict:
        """Return the verdict on elements that differ on two ranks; padding is not compared."""
        key, shape = one.key, one.layout.shape
        source = source_of(key.record_type, name)
        words: Locate = partial(element, shape=shape, name=name)
        if source is not None and key.record_type in MICRO_TYPES:
            words = self.records.words(key, source.quantity, shape, self.locator) or words
        local = words_of(other.layout, words)
        tokens = None if key.record_type in UPDATE_TYPES else self.records.lead(key, shape)
        if tokens is None:
            found = Aligned(other.array, one.array, partial(shard_blocks, other, [one]), local)
        else:
            mine, theirs = (token_part(s.array, s.layout, *tokens) for s in (one, other))
            found = Aligned.of_tokens(TokenRows(theirs, [mine], np.flatnonzero(theirs.rows >= 0)), local)
        case = Case(QUANTITY, f"{key.record_type}/{name}", self.place, SAME, local, other.array.shape)
        verdict = judge_aligned(case, found)
        return verdict if verdict.ok else replace(verdict, detail=_sentence(name, one, other, verdict))

    def _elsewhere(self, one: Key, other: Key) -> Verdict:
        """Return the verdict on two ranks that should hold the same tokens, but do not."""
        tokens = [set(self.records.places(key).canonical.tolist()) for key in (one, other)]
        odd = sorted(tokens[0] ^ tokens[1])
        where = "in other places"
        if odd:
            having, lacking = (one, other) if odd[0] in tokens[0] else (other, one)
            where = f"{self.locator.token(odd[0])} is on rank {having.rank} and not on rank {lacking.rank}"
        detail = f"the tokens of {other} do not lie as those of rank {one.rank}, which it repeats: {where}"
        return Verdict.fault(Status.COVERAGE, QUANTITY, one.record_type, self.place, detail, len(odd))

    def _norms(self, keys: Iterable[Key]) -> Iterator[Shard]:
        for key in keys:
            norm = norm_of(self.records.read(key))
            if norm is not None:
                yield Shard(norm, whole_layout(()), key)


def _sentence(name: str, one: Shard, other: Shard, verdict: Verdict) -> str:
    first, second = one.key, other.key
    ranks = f"{name} of rank {second.rank}" if second.micro is None else f"{name} in {second}"
    if verdict.status is Status.DTYPE:
        types = [dtype_name(shard.array.dtype) for shard in (one, other)]
        return f"{ranks} is {types[1]}, that of rank {first.rank} {types[0]}"
    worst = verdict.worst
    assert worst is not None
    return (
        f"{ranks} differs from that of rank {first.rank} in {verdict.over} of {verdict.count} elements, most at "
        f"{worst.where}: {worst.actual!r} and {worst.golden!r}"
    )
