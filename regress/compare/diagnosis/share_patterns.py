"""Patterns of a gradient that is a sum of its microbatches' own: how often each of them counts, on each rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from regress.compare.diagnosis.failure_pattern import Pattern
from regress.compare.diagnosis.run_context import RunContext
from regress.compare.verdicts.verdict import Verdict

KEY = "microbatches"
_SAME = 1e-4

Counts = dict[tuple[int, int], float]
"""(Lowest rank, microbatch) -> how often its gradient counts."""


def share_patterns(same: Sequence[Verdict], scene: RunContext) -> Iterator[Pattern]:
    """Yield what the counts of microbatches have in common, over all ranks.

    Args:
        same: failing verdicts on one tensor, each with the counts of the microbatches that count wrongly.
    """
    patterns = [(v, v.affected.held[KEY]) for v in same if v.affected is not None and KEY in v.affected.held]
    if not patterns or len(patterns) < len(same):
        return
    ranks = {tuple(place): name for name, place in patterns[0][1]["of"].items()}
    holders: Mapping[str, Sequence[int]] = patterns[0][1]["holders"]
    found = [(verdict.place.rank or 0, _counts(numbers)) for verdict, numbers in patterns]
    own = [_own(rank, counts, ranks, holders) for rank, counts in found]
    if own and all(own) and len({tuple(numbers or ()) for numbers in own}) == 1:
        alone = own[0] or []
        every = len(alone) == len({micro for _, micro in found[0][1]})
        which = "its own microbatches" if every else f"its own microbatch {', '.join(map(str, alone))}"
        yield Pattern(f"{KEY}:own", f"a sum in which each rank has {which} alone", {"which": alone})
        return
    if any(not _alike(counts, found[0][1]) for _, counts in found):
        sums = [_partial(rank, counts, ranks, holders) for rank, counts in found]
        if None not in sums and len({*sums}) > 1 and _apart([s for s in sums if s is not None]):
            words = "a sum in which each rank has the microbatches of some ranks, its own among them, and no others"
            yield Pattern(f"{KEY}:own", words, {"ranks": [sorted(s) for s in {*sums} if s is not None]})
        return
    counts = found[0][1]
    if not _alike(counts, dict.fromkeys(counts, next(iter(counts.values())))):  # else it is a factor
        yield from _of_all(counts, scene)


def _of_all(counts: Counts, scene: RunContext) -> Iterator[Pattern]:
    """Yield patterns of counts that are the same on all ranks."""
    by_micro: dict[int, set[float]] = {}
    for (_, micro), count in counts.items():
        by_micro.setdefault(micro, set()).add(count)
    listed = ", ".join(
        f"microbatch {micro}{f' of rank {rank}' if len({r for r, _ in counts}) > 1 else ''} counts {count:.5g} times"
        for (rank, micro), count in sorted(counts.items())
    )
    numbers = {"counts": [[rank, micro, count] for (rank, micro), count in sorted(counts.items())]}
    yield Pattern(KEY, f"a sum of the microbatches' own gradients in which {listed}", numbers)
    single = {micro: next(iter(own)) for micro, own in by_micro.items() if len(own) == 1}
    if len(single) < len(by_micro):
        return
    last = max(single)
    if single[last] == 1.0 and all(not count for micro, count in single.items() if micro != last):
        yield Pattern(f"{KEY}:last", "only the last microbatch counts")
    sizes = {size for size in (*scene.mesh.values(), scene.world_size or 1) if size > 1}
    for size in sorted(sizes):
        if len(single) > 1 and all(
            math.isclose(count, float(size) ** (last - micro), rel_tol=_SAME)
            for micro, count in single.items()
        ):
            words = f"each microbatch counts {size} times as often as the one after it: it is summed over {size} ranks"
            yield Pattern(f"{KEY}:powers", f"{words} again with each later one", {"ranks": size})


def _counts(numbers: Mapping[str, Any]) -> Counts:
    """Return the count of every microbatch, those that count as they should included."""
    return {
        (place[0], place[1]): float(numbers["counts"].get(name, 1.0)) for name, place in numbers["of"].items()
    }


def _own(
    rank: int, counts: Counts, names: Mapping[tuple[int, ...], str], holders: Mapping[str, Sequence[int]]
) -> list[int] | None:
    """Return the numbers of the microbatches of which a rank has its own alone, with any factor; None for other sums.

    All other microbatches must count once.
    """
    alone: set[int] = set()
    for place, count in counts.items():
        if not math.isclose(count, 1.0, abs_tol=_SAME):
            alone.add(place[1])
    for place, count in counts.items():
        if place[1] in alone and (rank in holders[names[place]]) != bool(count):
            return None
    several = all(len([p for p in counts if p[1] == micro]) > 1 for micro in alone)
    return sorted(alone) if alone and several else None


def _partial(
    rank: int, counts: Counts, names: Mapping[tuple[int, ...], str], holders: Mapping[str, Sequence[int]]
) -> frozenset[int] | None:
    """Return the ranks whose microbatches a rank has, all with one factor, and others not at all; None otherwise."""
    there = {place for place, count in counts.items() if count}
    factors = {counts[place] for place in there}
    own = {place for place in counts if rank in holders[names[place]]}
    if not there or there == {*counts} or not own <= there:
        return None
    if any(not math.isclose(factor, next(iter(factors)), rel_tol=_SAME) for factor in factors):
        return None
    return frozenset(number for place in there for number in holders[names[place]])


def _apart(sums: Sequence[frozenset[int]]) -> bool:
    """Return True for sets of ranks that are equal or have none in common."""
    return all(one == other or one.isdisjoint(other) for one in sums for other in sums)


def _alike(counts: Counts, others: Counts) -> bool:
    return counts.keys() == others.keys() and all(
        math.isclose(count, others[place], rel_tol=_SAME, abs_tol=_SAME) for place, count in counts.items()
    )
