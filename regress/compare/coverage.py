"""The proof that every token was computed once, and that some rank holds each element; and that all was compared."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from regress.compare.alignment.element_names import Locator
from regress.compare.alignment.local_shard import others, uncovered
from regress.compare.alignment.record_keys import Key
from regress.compare.alignment.token_places import Mask
from regress.compare.diagnosis.hypotheses import Truth
from regress.compare.quantities import (
    MICRO_TYPES,
    OPEN_TYPES,
    UPDATE_TYPES,
)
from regress.compare.record_plan import Plan
from regress.compare.update_records import Records
from regress.compare.verdicts.tensor_case import element
from regress.compare.verdicts.verdict import Status, Verdict, Worst
from regress.dump.coordinates import Place
from regress.layout import TokenFrame

QUANTITY = "coverage"
_WERE = ("as was", "as were")


def lost(name: str, place: Place, detail: str, count: int = 1) -> Verdict:
    """Return the verdict on a record or part that must be there."""
    return Verdict.fault(Status.COVERAGE, QUANTITY, name, place, detail, count)


def not_compared(found: Iterable[Verdict], quantities: Iterable[str], place: Place) -> Iterator[Verdict]:
    """Yield a verdict on each quantity of which no element was compared, as it could never fail."""
    compared: dict[str, int] = {}
    for verdict in found:
        compared[verdict.quantity] = compared.get(verdict.quantity, 0) + verdict.count + (not verdict.ok)
    for quantity in quantities:
        if not compared.get(quantity):
            detail = f"not one element of {quantity} was compared, so it could not fail"
            yield Verdict(Status.COVERAGE, QUANTITY, quantity, place, detail)


def judge_coverage(
    record_type: str,
    found: Mapping[Key, NDArray[np.int64]],
    frame: TokenFrame,
    place: Place,
    locator: Locator | None = None,
    *,
    expected: Mask | None = None,
) -> Verdict:
    """Return one verdict on a type: each of the frame's tokens must lie in exactly one of these records.

    Args:
        found: flat canonical indices of the tokens of each record; of ranks that hold the same tokens only one.
        expected: ``[frame.size]`` the tokens that must be there, by default all; the others may be there once.
    """
    times = counted(found, frame)
    needed = np.ones(frame.size, bool) if expected is None else expected
    count = int(np.count_nonzero(needed))
    wrong = np.flatnonzero((times > 1) | (needed & (times == 0)))
    if not wrong.size:
        return Verdict(Status.OK, QUANTITY, record_type, place, count=count)
    missing = wrong[times[wrong] == 0]
    index = int(missing[0] if missing.size else wrong[0])
    words = (locator or Locator(frame)).token(index)
    if missing.size:
        detail = f"{words} was produced by no microbatch{others(missing.size, 'token', _WERE)}"
    else:
        holders = [
            key for key, tokens in found.items() for _ in range(int(np.count_nonzero(tokens == index)))
        ]
        how_often = "twice" if len(holders) == 2 else f"{len(holders)} times"
        detail = f"{words} was produced {how_often}: {_named(holders)}{others(wrong.size, 'token', _WERE)}"
    off = float(abs(times[index] - 1))
    return Verdict(
        Status.COVERAGE,
        QUANTITY,
        record_type,
        place,
        detail=detail,
        worst=Worst((index,), words, 1.0, float(times[index]), off),
        multiple=math.inf,
        max_error=float(np.abs(times[wrong] - 1).max()),
        over=int(wrong.size),
        count=count,
        reason="each token is computed once, in one microbatch of one rank",
    )


def counted(found: Mapping[Key, NDArray[np.int64]], frame: TokenFrame) -> NDArray[np.int64]:
    """Return how many times each token of a frame lies in some records."""
    tokens = np.concatenate([np.zeros(0, np.int64), *found.values()])
    return np.bincount(tokens, minlength=frame.size)


def _named(holders: list[Key]) -> str:
    """Return text such as ``microbatches 1 and 2``, with ranks where there are several."""
    if len({key.rank for key in holders}) > 1:
        return " and ".join(f"rank {key.rank} microbatch {key.micro}" for key in holders)
    if len({key.micro for key in holders}) == 1:
        return f"microbatch {holders[0].micro} alone"
    return f"microbatches {' and '.join(str(key.micro) for key in holders)}"


def judge_elements(
    actual: Records, plan: Plan, golden: Truth, locator: Locator, place: Place
) -> Iterator[Verdict]:
    """Yield verdicts on the coverage of full tensors of an update, and of each microbatch's module outputs.

    There is no verdict where one rank holds the whole tensor: elements that it lacks are missing at its place.

    Args:
        golden: ``type -> tensor name -> golden values``, other types than those of open names are left out.
        place: place of the update.
    """
    for record_type, quantity in (
        *((record_type, record_type) for record_type in OPEN_TYPES),
        ("token_gradient", "logit_gradient"),
    ):
        names, groups = golden.get(quantity, {}), actual.groups(record_type)
        sharded = (actual.all[key][0].shards for keys in groups for key in keys)
        if not names or not groups or not (len(plan.ranks) > 1 or any(sharded)):
            continue
        whole = record_type in UPDATE_TYPES
        shapes = {name: values.shape if whole else None for name, values in names.items()}
        verdicts = [v for keys in groups for v in _of_group(actual, keys, shapes, locator, place)]
        if plan.divided and record_type in OPEN_TYPES:
            lacking = names.keys() - {*actual.names(key for keys in groups for key in keys)}
            verdicts += [
                Verdict(Status.MISSING, QUANTITY, f"{record_type}/{name}", place, f"no rank holds {name}")
                for name in names
                if name in lacking
            ]
        yield from verdicts
        if not verdicts and record_type in UPDATE_TYPES:
            elements = sum(math.prod(shape or ()) for shape in shapes.values())
            yield Verdict(Status.OK, QUANTITY, record_type, place, count=elements)


def _of_group(
    actual: Records,
    keys: list[Key],
    shapes: Mapping[str, tuple[int, ...] | None],
    locator: Locator,
    place: Place,
) -> Iterator[Verdict]:
    if not all(actual.alike(keys[0], key) for key in keys):
        return  # other places are not comparable here; replicas have a verdict on them
    for name, expected_shape in shapes.items():
        parts = [*actual.shards(name, keys)]
        if not parts:
            continue  # a tensor that nobody holds, or holds in another shape, has a verdict of its own
        shape = parts[0].layout.shape if expected_shape is None else expected_shape
        missing = uncovered(shape, (part.layout for part in parts if part.layout.shape == shape))
        if missing is not None:
            record_type, (count, index) = keys[0].record_type, missing
            words = actual.words(keys[0], record_type, shape, locator) if record_type in MICRO_TYPES else None
            where = element(index, shape, name) if words is None else f"{words(index)} of {name}"
            detail = f"{where} is held by no rank{others(count)}"
            found = lost(f"{record_type}/{name}", place, detail, count)
            reason = "each element of a tensor is held by some rank"
            yield replace(found, count=math.prod(shape), reason=reason)
