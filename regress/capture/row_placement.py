"""Placement of rows of logits at the tokens that they train on, by the ids alone: whatever a trainer cut or chunked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from regress.capture.softmax_calls import SeenRows
from regress.capture.softmax_rows import UNKNOWN, SoftmaxRows
from regress.errors import CaptureError

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Group:
    """Rows that cover places of the ids once: the flat place of each in ``[B, T + 1]``."""

    places: Ints
    rows: SoftmaxRows
    width: int

    @property
    def targets(self) -> Ints:
        return self.rows.targets_R.cpu().numpy()

    @property
    def live(self) -> NDArray[np.bool_]:
        return self.rows.live_R.cpu().numpy()

    @property
    def cells(self) -> tuple[Ints, Ints]:
        """Row and column of each place."""
        return self.places // self.width, self.places % self.width


def placed_groups(seen: Sequence[SeenRows], ids: Ints) -> Iterator[Group]:
    """Yield the rows in groups, each of which fits the ids: all of them, each by itself, or one chunk after another.

    Raises:
        CaptureError: if they do not.
    """
    if not seen:
        return
    if len(seen) > 1 and (together := placed(seen, ids)) is not None:
        yield together
        return
    waiting: list[SeenRows] = []
    for one in seen:
        waiting.append(one)
        if (group := placed(waiting, ids)) is not None:
            yield group
            waiting = []
    if waiting:
        shapes = ", ".join(str(list(one.shape)) for one in waiting[:4])
        raise CaptureError(f"""logits of shape {shapes} became log-probs, and under no arrangement does each row train
        on the token of the ids {list(ids.shape)} that follows it: give the ids that the model was called with by
        record(input_ids=...), or name the last hidden state by record(decoder=..., head=...)""")


def placed(parts: Sequence[SeenRows], ids: Ints) -> Group | None:
    """Return the first arrangement of the parts' rows under which each trains on the token that follows it."""
    B, T = ids.shape
    wide = np.concatenate([ids, np.full((B, 1), UNKNOWN)], 1)
    for rows, columns in _in_rows(parts, B):
        targets, live = rows.targets_R.cpu().numpy(), rows.live_R.cpu().numpy()
        asked = live & (targets != UNKNOWN)
        for first in _firsts(columns, T):
            grid = np.arange(B)[:, None] * (T + 1) + first + np.arange(columns)
            places = grid.reshape(-1)
            known = wide.reshape(-1)[places]
            if ((known == targets) | (known == UNKNOWN))[asked].all():
                return Group(places, rows, T + 1)
    return None


def _in_rows(parts: Sequence[SeenRows], B: int) -> Iterator[tuple[SoftmaxRows, int]]:
    """Yield the rows of the parts in the order of the ids' rows, and how many columns they then have."""
    known = [one.rows for one in parts if one.rows is not None]
    if len(parts) > 1 and all(len(one.shape) == 2 and one.shape[0] == B for one in parts):
        order = np.concatenate(
            [np.arange(np.prod(one.shape)).reshape(one.shape) + n for one, n in _offsets(parts)], 1
        )
        yield _taken(SoftmaxRows.joined(known), order.reshape(-1)), order.shape[1]
    total = sum(len(one.targets) for one in parts)
    if total % B == 0:
        yield SoftmaxRows.joined(known), total // B


def _offsets(parts: Sequence[SeenRows]) -> Iterator[tuple[SeenRows, int]]:
    start = 0
    for one in parts:
        yield one, start
        start += len(one.targets)


def _taken(rows: SoftmaxRows, order: Ints) -> SoftmaxRows:
    index = torch.from_numpy(order)
    return SoftmaxRows(*(each[index.to(each.device)] for each in vars(rows).values()))


def _firsts(columns: int, T: int) -> list[int]:
    """Return the columns that a row's first target may lie in, the usual first."""
    if columns > T:
        return []
    usual = [1] if columns >= T - 1 else [T - columns, T - columns + 1, 1]
    return list(dict.fromkeys([*usual, *range(1, T + 2 - columns)]))
