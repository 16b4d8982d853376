"""Tokens that the rows of a padded batch hold, found by their content.

A row without an id is looked up among the rollouts of its step by its tokens. Rows that repeat a rollout more often
than it was sampled are the copies that fill a batch up to a multiple of the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from regress.layout import SampleKey

Ids = NDArray[np.int64]
HEAD = 4
"""Number of tokens by which rollouts are looked up."""


@dataclass(frozen=True)
class PaddedRow:
    """A row of a batch: tokens ``start:stop`` of the row are those of a sample, from its first on.

    Attributes:
        key: key of the sample; made up where no rollout tells it.
        copy_of: the sample that this row only repeats.
        sure: True if no other rollout of the step has the same tokens.
        known: True if a rollout tells the key.
        open: True if nothing tells where the tokens begin and end.
        line: number of the row in its batch, where it holds several samples; None: each row holds one.
    """

    key: SampleKey
    start: int
    stop: int
    copy_of: SampleKey | None = None
    sure: bool = True
    known: bool = True
    open: bool = False
    line: int | None = None


@dataclass
class Rollouts:
    """The rollouts of a step by their tokens.

    Args:
        tokens: tokens of each sample, in the order in which a batch sorts them.
    """

    tokens: Mapping[SampleKey, tuple[int, ...]]
    _by_head: dict[tuple[int, ...], list[tuple[int, ...]]] = field(init=False)
    _keys: dict[tuple[int, ...], list[SampleKey]] = field(init=False)

    def __post_init__(self) -> None:
        self._by_head, self._keys = {}, {}
        for key, tokens in self.tokens.items():
            if tokens not in self._keys:
                self._by_head.setdefault(tokens[:HEAD], []).append(tokens)
            self._keys.setdefault(tokens, []).append(key)

    def keys(self, tokens: tuple[int, ...]) -> list[SampleKey]:
        """Return the keys of the samples with these tokens."""
        return self._keys[tokens]

    def find(self, row: Sequence[int]) -> tuple[int, tuple[int, ...]] | None:
        """Return the start of a rollout in a row, and its tokens: the longest that leaves only padding around it."""
        edge = 1
        while edge < len(row) and row[edge] == row[0]:
            edge += 1
        for start in dict.fromkeys((0, *range(edge, -1, -1))):
            found = [tokens for tokens in self._at(row, start) if _padding(row[start + len(tokens) :])]
            if found:
                return start, max(found, key=len)
        return None

    def find_all(self, row: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
        """Return the start and the tokens of the rollouts that a row holds, end to end or with padding between them.

        Returns:
            Nothing unless rollouts and padding cover the whole row.
        """
        one = self.find(row)
        if one is not None:
            return [one]
        dead: set[int] = set()

        def cover(start: int) -> list[tuple[int, tuple[int, ...]]] | None:
            if start in dead:
                return None
            for tokens in sorted(self._at(row, start), key=len, reverse=True):
                stop = start + len(tokens)
                if _padding(row[stop:]):
                    return [(start, tokens)]
                rest = cover(stop) or cover(_run_end(row, stop))
                if rest is not None:
                    return [(start, tokens), *rest]
            dead.add(start)
            return None

        return cover(0) or cover(_run_end(row, 0)) or []

    def _at(self, row: Sequence[int], start: int) -> Iterable[tuple[int, ...]]:
        for size in range(1, HEAD + 1):
            for tokens in self._by_head.get(tuple(row[start : start + size]), ()):
                if len(tokens[:HEAD]) == size and tuple(row[start : start + len(tokens)]) == tokens:
                    yield tokens


def _run_end(row: Sequence[int], start: int) -> int:
    """Return the end of the run of equal tokens that begins at a place."""
    stop = start + 1
    while stop < len(row) and row[stop] == row[start]:
        stop += 1
    return stop


def _padding(rest: Sequence[int]) -> bool:
    return len({*rest}) < 2


def place_rows(
    batches: Mapping[str, tuple[Ids, NDArray[np.bool_]]],
    rollouts: Rollouts | None,
    positions: Mapping[str, Ids] | None = None,
) -> dict[str, list[PaddedRow]]:
    """Find the samples of the rows of all batches of a step; a packed row holds several.

    Args:
        batches: name -> token ids ``[b, W]``, and which of them count in the loss; in the order of the batch.
        rollouts: rollouts of the step; None where they were not recorded.
        positions: name -> ``[b, W]`` positions, which begin anew with each sample of a packed row.
    """
    pad = padding_id(batches.values())
    seen: dict[tuple[int, ...], int] = {}
    placed: dict[str, list[PaddedRow]] = {}
    for name, (ids, mask) in batches.items():
        placed[name] = []
        for index, row in enumerate(ids.tolist()):
            found = [] if rollouts is None else rollouts.find_all(row)
            if rollouts is not None and found:
                own = [_known(rollouts.keys(tokens), seen, start, tokens) for start, tokens in found]
            else:
                where = (positions or {}).get(name)
                start, stop = _stripped(ids[index], mask[index], pad)
                own = _unknown(name, index, start, stop, None if where is None else where[index])
            placed[name] += [replace(one, line=index) for one in own]
    if all(len({row.line for row in rows}) == len(rows) for rows in placed.values()):
        return {name: [replace(row, line=None) for row in rows] for name, rows in placed.items()}
    return placed


def _unknown(name: str, index: int, start: int, stop: int, positions: Ids | None) -> list[PaddedRow]:
    """Return the samples of a row that no rollout tells: one, or those that its positions tell apart."""
    if positions is None:
        return [PaddedRow((f"{name} row", index), start, stop, known=False)]
    own = positions[start:stop]
    begins = [start, *(start + 1 + np.flatnonzero(np.diff(own) <= 0)).tolist()]
    if len(begins) == 1:
        return [PaddedRow((f"{name} row", index), start, stop, known=False)]
    ends = [*begins[1:], stop]
    return [
        PaddedRow((f"{name} row {index}", number), first, end, known=False)
        for number, (first, end) in enumerate(zip(begins, ends, strict=True))
    ]


def _known(
    keys: list[SampleKey], seen: dict[tuple[int, ...], int], start: int, tokens: tuple[int, ...]
) -> PaddedRow:
    number = seen[tokens] = seen.get(tokens, -1) + 1
    stop, sure = start + len(tokens), len(keys) == 1
    if number < len(keys):
        return PaddedRow(keys[number], start, stop, sure=sure)
    group, run = original = keys[number % len(keys)]
    return PaddedRow((f"{group} (copy {number // len(keys)})", run), start, stop, copy_of=original, sure=sure)


def padding_id(batches: Iterable[tuple[Ids, NDArray[np.bool_]]]) -> int | None:
    """Return the padding id: the token that most rows begin or end with outside of the loss."""
    votes: dict[int, int] = {}
    for ids, mask in batches:
        for row, counted in zip(ids, mask, strict=True):
            for edge, next_to in ((-1, -2), (0, 1)):
                if row.size > 1 and not counted[edge] and row[edge] == row[next_to]:
                    votes[int(row[edge])] = votes.get(int(row[edge]), 0) + 1
    return max(votes, key=lambda value: (votes[value], -value), default=None)


def _stripped(row: Ids, counted: NDArray[np.bool_], pad: int | None) -> tuple[int, int]:
    """Return the bounds of a row without padding; loss tokens are never padding."""
    kept = np.flatnonzero((row != pad) | counted) if pad is not None else np.arange(row.size)
    return (int(kept[0]), int(kept[-1]) + 1) if kept.size else (0, row.size)
