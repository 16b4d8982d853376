"""Tests of golden cases: the parts of a replay, and what cannot be replayed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regress.replay.test_matrix import Item, Replay


@dataclass(frozen=True, eq=False)
class ReplayPart:
    """One test: the quantities of one rank in one microbatch of a replay, at all of its steps.

    Attributes:
        id: ``case/variant/rank0/micro1``; without a microbatch, or a rank, for quantities that have none.
        items: each quantity at each place.
    """

    id: str
    replay: Replay
    items: tuple[Item, ...]


@dataclass(frozen=True)
class Broken:
    """A case or replay that cannot be judged: a test that fails with the reason; ``case`` is its name, if known."""

    id: str
    problem: str
    case: str | None = None


def parts(replay: Replay, items: Iterable[Item]) -> Iterator[ReplayPart]:
    """Yield the tests of a replay, in the order of computation."""
    grouped: dict[str, list[Item]] = {}
    for item in items:
        numbered = (("rank", item.place.rank), ("micro", item.place.micro))
        words = [f"{word}{number}" for word, number in numbered if number is not None]
        grouped.setdefault("/".join([replay.name, *words]), []).append(item)
    for id, found in grouped.items():
        yield ReplayPart(id, replay, tuple(found))
