"""Counts of how often an invariant was checked, and the places where it does not hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from regress.compare.verdicts.verdict import Status, Verdict, Worst
from regress.dump.coordinates import Place

QUANTITY = "invariants"
REASON = "it is true of every correct update, whatever was recorded"

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Broken:
    """A place where an invariant does not hold: its words, the expected value and the actual one."""

    where: str
    expected: float
    actual: float


@dataclass
class Checked:
    """Count of checks of an invariant, the places where it is broken, and why others were left out."""

    count: int = 0
    broken: list[Broken] = field(default_factory=list)
    wrong: int = 0
    left: list[str] = field(default_factory=list)

    def leave(self, why: str) -> None:
        """Keep why a part of what is recorded was not checked."""
        self.left.append(why)

    def elements(
        self, expected: Floats, actual: Floats, bound: Floats | float, words: Callable[[int], str]
    ) -> None:
        """Count a comparison of arrays; keep the element that differs most."""
        self.count += int(actual.size)
        if not actual.size:
            return
        with np.errstate(invalid="ignore"):
            error = np.abs(actual - expected)
            off = ~(error <= bound) & np.isfinite(actual)
        if off.any():
            index = int(np.argmax(np.where(off, error, -1.0)))
            self.wrong += int(off.sum())
            self.broken.append(Broken(words(index), float(expected[index]), float(actual[index])))

    def number(self, expected: float, actual: float, bound: float, words: str) -> None:
        """Count one comparison of numbers."""
        self.elements(np.array([expected]), np.array([actual]), bound, lambda _: words)

    def verdict(self, name: str, place: Place, sentence: str) -> Verdict:
        """Return one verdict for the update."""
        if not self.broken:
            return Verdict(Status.OK, QUANTITY, name, place, count=self.count, reason=REASON)
        worst = max(self.broken, key=lambda one: abs(one.actual - one.expected))
        others = f" (and {self.wrong - 1} more)" if self.wrong > 1 else ""
        detail = f"{sentence}: {worst.where} is {worst.actual:.9g}, not {worst.expected:.9g}{others}"
        error = abs(worst.actual - worst.expected)
        return Verdict(
            Status.DRIFT,
            QUANTITY,
            name,
            place,
            detail=detail,
            worst=Worst((), worst.where, worst.expected, worst.actual, error),
            multiple=math.inf,
            max_error=error,
            over=self.wrong,
            count=self.count,
            reason=REASON,
        )
