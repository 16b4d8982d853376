"""Rules for advantages: their deviation, their place, their scale."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from regress.interop.modes.discrepancy import TRAINER, Discrepancy, some
from regress.interop.modes.mode_rows import Floats, ModeRow, moved
from regress.interop.modes.step_context import Link, StepContext

_EXPLAINS = ("advantages", "token_loss", "policy_loss", "loss", "gradient", "batch_inputs")
Mask = NDArray[np.bool_]
_FACTOR = 1e-3
"""Relative distance at which a factor is one that is known: what is added to a deviation changes it a little."""


def advantages(context: StepContext, link: Link) -> Iterator[Discrepancy]:
    """Yield what is wrong with the advantages that one mode passes on to another."""
    known = [(a, b) for a, b in link.pairs if _usable(a, b)]
    wrong = [(a, b) for a, b in known if not _same(link, a, b)]
    if not wrong:
        return
    misplaced = _misplaced(link, wrong)
    if misplaced is not None:
        yield misplaced
        return
    there = [(a, b) for a, b in known if not a.idle]
    factors = {a.key: factor for a, b in there if (factor := _factor(a, b)) is not None}
    if len(factors) == len(there) and all(_same(link, a, b) for a, b in known if a.idle):
        found = _scaled(context, link, factors)
        if found is not None:
            yield found


def _usable(a: ModeRow, b: ModeRow) -> bool:
    mine, its = _pair(a, b)
    return mine.size == its.size > 0 and a.mask is not None and a.mask.size == mine.size


def _pair(a: ModeRow, b: ModeRow) -> tuple[Floats, Floats]:
    """Return the advantages of both rows, 0 where there are none."""
    mine, its = a.values.get("advantages"), b.values.get("advantages")
    if mine is None or its is None:
        return np.zeros(0), np.zeros(0)
    return np.nan_to_num(mine), np.nan_to_num(its)


def _mask(row: ModeRow) -> Mask:
    found = row.mask
    return np.zeros(0, bool) if found is None else found


def _same(link: Link, a: ModeRow, b: ModeRow) -> bool:
    mine, its = _pair(a, b)
    bound = link.close * float(np.abs(mine).max(initial=0.0))
    return bool((np.abs(mine - its) <= bound).all())


def _misplaced(link: Link, wrong: Sequence[tuple[ModeRow, ModeRow]]) -> Discrepancy | None:
    """Return advantages that do not lie where the mask of their datum is 1, with the same values."""
    one, other = link.whose
    names = [a.name for a, _ in wrong]
    for rule, words, place in (
        (
            "advantages-scattered",
            "at the first targets of a datum in place of those that its mask counts",
            _first,
        ),
        ("advantages-shifted", "one token too late", lambda mask: moved(mask, 1)),
        ("advantages-shifted", "one token too early", lambda mask: moved(mask, -1)),
        ("advantages-unmasked", "at every target, the prompt included", _everywhere),
    ):
        if all(_lies(link, a, b, place(_mask(a))) for a, b in wrong):
            return Discrepancy(
                rule,
                f"{link.what} of {other} lie {words}: they belong to the tokens whose loss_mask is 1",
                (f"{some(names, 'datum')}: the values are those of {one}, their places are others",),
                _EXPLAINS,
            )
    return None


def _first(mask: Mask) -> Mask:
    found = np.zeros(mask.size, bool)
    found[1 : 1 + int(mask.sum())] = True
    return found


def _everywhere(mask: Mask) -> Mask:
    found = np.ones(mask.size, bool)
    found[0] = False
    return found


def _lies(link: Link, a: ModeRow, b: ModeRow, chosen: Mask) -> bool:
    """Return True if a row's advantages are 0 but at some places, and there in the order of the expected ones."""
    mine, its = _pair(a, b)
    mask = _mask(a)
    if (chosen == mask).all() or its[~chosen].any():
        return False
    values, expected = its[chosen], mine[mask]
    bound = link.close * float(np.abs(expected).max(initial=0.0))
    if values.size == expected.size:
        return bool((np.abs(values - expected) <= bound).all())
    level = expected[:1] if expected.size else np.zeros(1)
    constant = (np.abs(expected - level) <= bound).all()
    return bool(constant) and bool((np.abs(values - level) <= bound).all())


def _factor(a: ModeRow, b: ModeRow) -> float | None:
    """Return the one factor between the advantages of two rows; None where there is none."""
    mine, its = _pair(a, b)
    mask = _mask(a)
    if its[~mask].any() or not mine[mask].all():
        return None
    ratios = its[mask] / mine[mask]
    spread = float(np.ptp(ratios)) if ratios.size else math.inf
    return float(ratios.mean()) if spread <= 1e-4 * float(np.abs(ratios).max(initial=0.0)) else None


def _scaled(context: StepContext, link: Link, factors: Mapping[tuple[str, int], float]) -> Discrepancy | None:
    one, other = link.whose
    values = [*factors.values()]
    if all(value == 0.0 for value in values):
        return Discrepancy(
            "advantages-lost",
            f"no {link.what} reach {other}",
            (f"all {len(values)} datums have {link.what} of 0",),
            _EXPLAINS,
        )
    if _all_near(values, -1.0):
        return Discrepancy(
            "advantages-sign",
            f"{link.what} of {other} have the other sign",
            (f"all {len(values)} datums have those of {one} times -1",),
            _EXPLAINS,
        )
    return (_of_deviation(context, link, factors) if one == TRAINER else None) or _of_scale(link, values)


def _of_deviation(
    context: StepContext, link: Link, factors: Mapping[tuple[str, int], float]
) -> Discrepancy | None:
    """Return another deviation of the groups: over N samples in place of N - 1, the reverse, or none at all."""
    groups: dict[str, list[ModeRow]] = defaultdict(list)
    for row in context.trainer:
        groups[row.key[0]].append(row)
    known = {key: (factor, groups[key[0]]) for key, factor in factors.items()}
    if any(len(rows) < 2 for _, rows in known.values()):
        return None
    steps = {key: math.sqrt(len(rows) / (len(rows) - 1)) for key, (_, rows) in known.items()}
    for power, over, than in ((1, "N", "N - 1"), (-1, "N - 1", "N")):
        if all(
            math.isclose(factor, steps[key] ** power, rel_tol=_FACTOR) for key, (factor, _) in known.items()
        ):
            sizes = sorted({len(rows) for _, rows in known.values()})
            proof = [
                f"advantages of {len(known)} datums are {steps[key] ** power:.6g} times those of {link.whose[0]}, the "
                f"factor between deviations over {size} and {size - 1} samples of a group"
                for size in sizes
                for key in [next(key for key, (_, rows) in known.items() if len(rows) == size)]
            ]
            ddof = context.setting("algorithm", "ddof")
            said = [] if ddof is None else [f"{link.whose[0]} has algorithm.ddof={ddof}"]
            return Discrepancy(
                "deviation-ddof",
                f"{link.whose[1]} takes the standard deviation of a group over {over} samples, {link.whose[0]} over "
                f"{than}: algorithm.ddof",
                (*proof, *said),
                _EXPLAINS,
            )
    deviations = {key: _deviation(context, rows) for key, (_, rows) in known.items()}
    if len({round(d, 9) for d in deviations.values()}) > 1 and all(
        d and math.isclose(factor, d, rel_tol=_FACTOR)
        for (factor, _), d in ((known[key], deviations[key]) for key in known)
    ):
        return Discrepancy(
            "advantages-not-scaled",
            f"{link.whose[1]} does not divide advantages by the deviation of the group: algorithm.scale",
            (
                f"advantages of {len(known)} datums are those of {link.whose[0]} times the deviation of their group",
            ),
            _EXPLAINS,
        )
    return None


def _deviation(context: StepContext, rows: Sequence[ModeRow]) -> float:
    rewards = [row.reward for row in rows if row.reward is not None]
    if len(rewards) < len(rows):
        return 0.0
    ddof = context.setting("algorithm", "ddof")
    return float(np.std(rewards, ddof=ddof if isinstance(ddof, int) else 1))


def _of_scale(link: Link, values: Sequence[float]) -> Discrepancy | None:
    first = values[0]
    if not _all_near(values, first):
        return None
    one, other = link.whose
    return Discrepancy(
        "advantages-scaled",
        f"{link.what} of {other} are multiplied by a number: another denominator or scale",
        (f"all {len(values)} datums have those of {one} times {first:.9g}",),
        _EXPLAINS,
    )


def _all_near(values: Sequence[float], to: float) -> bool:
    return all(math.isclose(value, to, rel_tol=1e-4) for value in values)
