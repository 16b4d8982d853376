"""Matching of the samples of two dumps: by id, else by the tokens themselves."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from regress.layout import SampleKey


@dataclass(frozen=True)
class Tokens:
    """The tokens of a sample without padding, as their number and a hash."""

    count: int
    digest: bytes

    @classmethod
    def of(cls, values: NDArray[Any]) -> Tokens:
        """Hash token ids of any integer type."""
        ids = np.ascontiguousarray(values, np.int64)
        return cls(ids.size, hashlib.sha256(ids.data).digest())

    def __len__(self) -> int:
        return self.count


Content: TypeAlias = Tokens | tuple[int, ...]
"""Key that samples are matched by: equal for equal tokens."""

ValuesOf = Mapping[str, NDArray[np.float64]]
"""Values computed for a sample, by name."""

Values = Callable[[str, SampleKey], ValuesOf]
"""The values of a sample on the side ``"golden"`` or ``"actual"``."""

TRAINED = ("token_gradient", "effective_valid", "response_mask")
"""Values that are 0 at all tokens of a sample that is not trained on, the most telling first."""

EXHAUSTIVE = 6
"""Most identical rollouts that are paired by trying all permutations; more of them are paired greedily."""


@dataclass(frozen=True)
class Sample:
    """A sample of one side.

    Attributes:
        content: its tokens, or None where nothing tells them.
        named: True if the key was recorded, and not made up by a reader.
        copy_of: the sample that it only repeats, as rows do that fill a batch up; None for a sample of its own.
        place: rank, microbatch and row, for samples with unknown tokens.
    """

    key: SampleKey
    content: Content | None = None
    named: bool = True
    copy_of: SampleKey | None = None
    place: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Matching:
    """The samples of one step, side by side.

    Attributes:
        golden_of: actual key -> golden key; several actual copies may have one golden sample.
        alias: golden key of a copy -> that of the sample it repeats.
        golden_only, actual_only: samples without a counterpart.
        ambiguous: identical rollouts that could have been paired otherwise; the closest values were.
        repeated: further copies of matched samples that are not trained on, by which a batch was filled up.
        by_content: number of samples found by tokens, not by id; ``by_place`` by rank, microbatch and row.
    """

    golden_of: Mapping[SampleKey, SampleKey]
    alias: Mapping[SampleKey, SampleKey] = field(default_factory=dict)
    golden_only: tuple[SampleKey, ...] = ()
    actual_only: tuple[SampleKey, ...] = ()
    ambiguous: tuple[SampleKey, ...] = ()
    repeated: tuple[SampleKey, ...] = ()
    by_content: int = 0
    by_place: int = 0


def numbered(names: Mapping[SampleKey, SampleKey], index: Mapping[SampleKey, int]) -> dict[SampleKey, int]:
    """Return the number of each sample that has one under its other name."""
    return {key: index[to] for key, to in names.items() if to in index}


def match_samples(
    golden: Sequence[Sample], actual: Sequence[Sample], values: Values | None = None
) -> Matching:
    """Pair the samples of two dumps.

    Samples are paired by id and tokens together, then by identical tokens (a multiset: each sample has one
    counterpart), then by id alone, where the tokens are what differs; where one side tells no tokens, by rank,
    microbatch and row. Copies go with the sample that they repeat, whatever their number.

    Args:
        values: tells identical rollouts apart, which may differ in rewards or log-probs; by default their order does.
    """
    own, theirs = _originals(golden), _originals(actual)
    pairs = {
        sample.key: sample.key
        for sample in theirs.values()
        if (known := own.get(sample.key)) is not None
        and sample.named
        and known.named
        and _alike(known, sample)
    }
    taken = set(pairs.values())
    left = [s for key, s in own.items() if key not in taken]
    right = [s for key, s in theirs.items() if key not in pairs]
    found, ambiguous = _by_content(left, right, values)
    pairs |= found
    taken = set(pairs.values())
    for key, sample in theirs.items():
        if key not in pairs and key in own and key not in taken and sample.named and own[key].named:
            pairs[key] = key
    placed = _by_place(own, theirs, pairs)
    pairs |= placed
    taken = set(pairs.values())
    copies = {s.key: pairs[s.copy_of] for s in actual if s.copy_of is not None and s.copy_of in pairs}
    alias = {s.key: s.copy_of for s in golden if s.copy_of is not None}
    surplus, further = _repeated(own, theirs, pairs, values)
    return Matching(
        {**pairs, **copies},
        {**alias, **surplus},
        tuple(key for key in own if key not in taken and key not in surplus),
        tuple(s.key for s in actual if s.key not in pairs and s.key not in copies and s.key not in further),
        tuple(ambiguous),
        (*surplus, *further),
        len(found),
        len(placed),
    )


def _repeated(
    golden: Mapping[SampleKey, Sample],
    actual: Mapping[SampleKey, Sample],
    pairs: Mapping[SampleKey, SampleKey],
    values: Values | None,
) -> tuple[dict[SampleKey, SampleKey], list[SampleKey]]:
    """Return the golden samples that only repeat a matched one, with that one, and such actual samples."""
    matched = {own.content: key for key in pairs.values() if (own := golden[key]).content is not None}
    taken = set(pairs.values())
    surplus = {
        key: matched[sample.content]
        for key, sample in golden.items()
        if key not in taken and sample.content in matched and _idle("golden", key, values)
    }
    further = [
        key
        for key, sample in actual.items()
        if key not in pairs and sample.content in matched and _idle("actual", key, values)
    ]
    return surplus, further


def _idle(side: str, key: SampleKey, values: Values | None) -> bool:
    """Return True if the records prove that a sample is not trained on: by its gradient, else by its mask."""
    contents = {} if values is None else values(side, key)
    found = next((contents[name] for name in TRAINED if name in contents), None)
    return found is not None and not np.nan_to_num(found).any()


def _by_place(
    golden: Mapping[SampleKey, Sample],
    actual: Mapping[SampleKey, Sample],
    pairs: Mapping[SampleKey, SampleKey],
) -> dict[SampleKey, SampleKey]:
    """Return pairs of the remaining samples by place, where one side does not tell tokens."""
    taken = set(pairs.values())
    free = {s.place: s for s in golden.values() if s.key not in taken and s.place is not None}
    found = {}
    for sample in actual.values():
        other = free.get(sample.place) if sample.place is not None and sample.key not in pairs else None
        if other is not None and None in (other.content, sample.content):
            found[sample.key] = other.key
    return found


def _originals(samples: Iterable[Sample]) -> dict[SampleKey, Sample]:
    return {sample.key: sample for sample in samples if sample.copy_of is None}


def _alike(golden: Sample, actual: Sample) -> bool:
    """Return True if the tokens do not contradict an id."""
    return golden.content is None or actual.content is None or golden.content == actual.content


def _by_content(
    golden: Sequence[Sample], actual: Sequence[Sample], values: Values | None
) -> tuple[dict[SampleKey, SampleKey], list[SampleKey]]:
    """Return pairs of samples with the same tokens, and the golden keys of those whose pairing was a choice."""
    groups: dict[Content, tuple[list[SampleKey], list[SampleKey]]] = {}
    for side, samples in enumerate((golden, actual)):
        for sample in samples:
            if sample.content is not None:
                groups.setdefault(sample.content, ([], []))[side].append(sample.key)
    pairs: dict[SampleKey, SampleKey] = {}
    ambiguous: list[SampleKey] = []
    for own, theirs in groups.values():
        if len(own) < 2 and len(theirs) < 2:
            chosen, choice = list(zip(own, theirs, strict=False)), False
        else:
            chosen, choice = _closest(own, theirs, values)
        pairs |= {key: known for known, key in chosen}
        ambiguous += [known for known, _ in chosen] if choice else []
    return pairs, ambiguous


def _closest(
    golden: Sequence[SampleKey], actual: Sequence[SampleKey], values: Values | None
) -> tuple[list[tuple[SampleKey, SampleKey]], bool]:
    """Return the pairing of identical rollouts with the least total distance, and whether values decided it."""
    if values is None or not golden or not actual:
        return list(zip(golden, actual, strict=False)), False
    golden_values, actual_values = (
        [values(side, key) for key in keys] for side, keys in _sides(golden, actual)
    )
    cost = np.array([[_distance(a, b) for b in actual_values] for a in golden_values])
    if not np.ptp(cost):  # whichever way they are paired comes to the same
        return list(zip(golden, actual, strict=False)), False
    chosen = _least(cost)
    return [(golden[i], actual[j]) for i, j in chosen], True


def _sides(
    golden: Sequence[SampleKey], actual: Sequence[SampleKey]
) -> tuple[tuple[str, Sequence[SampleKey]], tuple[str, Sequence[SampleKey]]]:
    return ("golden", golden), ("actual", actual)


def _distance(a: ValuesOf, b: ValuesOf) -> float:
    """Return the sum of the differences; values that one side lacks, or that are not finite, count for nothing."""
    return sum(
        float(np.abs(np.nan_to_num(a[name]) - np.nan_to_num(b[name])).sum())
        for name in a.keys() & b.keys()
        if a[name].shape == b[name].shape
    )


def _least(cost: NDArray[np.float64]) -> list[tuple[int, int]]:
    """Return row and column pairs of least total cost, the first of equal ones, so that results repeat."""
    rows, columns = cost.shape
    if rows > columns:
        return sorted((i, j) for j, i in _least(cost.T))
    if columns <= EXHAUSTIVE:
        lowest = min(
            permutations(range(columns), rows), key=lambda order: sum(cost[i, j] for i, j in enumerate(order))
        )
        return list(enumerate(lowest))
    found: list[tuple[int, int]] = []
    free_rows, free_columns = set(range(rows)), set(range(columns))
    for index in np.argsort(cost, axis=None, kind="stable"):
        i, j = divmod(int(index), columns)
        if i in free_rows and j in free_columns:
            found.append((i, j))
            free_rows.remove(i)
            free_columns.remove(j)
    return sorted(found)
