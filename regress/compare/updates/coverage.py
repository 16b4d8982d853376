"""The proof that every canonical token was produced exactly once, over all ranks that hold different tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from regress.compare.alignment.keys import Key
from regress.compare.alignment.local_shard import others
from regress.compare.alignment.locate import Locator
from regress.compare.verdicts.verdict import Place, Status, Verdict, Worst
from regress.layout import TokenFrame

QUANTITY = "coverage"
_WERE = ("as was", "as were")


def judge_coverage(
    stage: str,
    found: Mapping[Key, NDArray[np.int64]],
    frame: TokenFrame,
    place: Place,
    locator: Locator | None = None,
    *,
    wanted: NDArray[np.bool_] | None = None,
) -> Verdict:
    """Return one verdict on a stage: each of the frame's tokens must lie in exactly one of these records.

    Args:
        found: flat canonical indices of the tokens of each record; of ranks that hold the same tokens only one.
        wanted: ``[frame.size]`` the tokens that must be there, by default all; the others may be there once.
    """
    times = np.zeros(frame.size, np.int64)
    for tokens in found.values():
        np.add.at(times, tokens, 1)
    needed = np.ones(frame.size, bool) if wanted is None else wanted
    count = int(np.count_nonzero(needed))
    wrong = np.flatnonzero((times > 1) | (needed & (times == 0)))
    if not wrong.size:
        return Verdict(Status.OK, QUANTITY, stage, place, count=count)
    missing = wrong[times[wrong] == 0]
    index = int(missing[0] if missing.size else wrong[0])
    words = (locator or Locator(frame)).token(index)
    if missing.size:
        detail = f"{words} was produced by no microbatch{others(missing.size, 'token', _WERE)}"
    else:
        holders = [
            key for key, tokens in found.items() for _ in range(int(np.count_nonzero(tokens == index)))
        ]
        detail = f"{words} was produced {_count(len(holders))}: {_named(holders)}{others(wrong.size, 'token', _WERE)}"
    off = float(abs(times[index] - 1))
    return Verdict(
        Status.COVERAGE,
        QUANTITY,
        stage,
        place,
        detail=detail,
        worst=Worst((index,), words, 1.0, float(times[index]), off),
        multiple=float("inf"),
        max_error=float(np.abs(times[wrong] - 1).max()),
        over=int(wrong.size),
        count=count,
        reason="each token is computed once, in one microbatch of one rank",
    )


def not_compared(found: Iterable[Verdict], quantities: Iterable[str], place: Place) -> Iterator[Verdict]:
    """Yield a verdict on each quantity of which no element was compared, as it could never fail."""
    compared: dict[str, int] = {}
    for verdict in found:
        compared[verdict.quantity] = compared.get(verdict.quantity, 0) + verdict.count + (not verdict.ok)
    for quantity in quantities:
        if not compared.get(quantity):
            detail = f"not one element of {quantity} was compared, so it could not fail"
            yield Verdict(Status.COVERAGE, QUANTITY, quantity, place, detail)


def _count(times: int) -> str:
    return "twice" if times == 2 else f"{times} times"


def _named(holders: list[Key]) -> str:
    """Return text such as ``microbatches 1 and 2``, with ranks where there are several."""
    if len({key.rank for key in holders}) > 1:
        return " and ".join(f"rank {key.rank} microbatch {key.micro}" for key in holders)
    if len({key.micro for key in holders}) == 1:
        return f"microbatch {holders[0].micro} alone"
    return f"microbatches {' and '.join(str(key.micro) for key in holders)}"
