"""Tolerances: how far a value may lie from the golden one, and the source of that bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from regress.errors import ConfigError
from regress.golden.case_manifest import ToleranceEntry


@dataclass(frozen=True)
class Tolerance:
    """A bound on ``max |actual - golden| / scale``, and its reason.

    ``scale`` is the largest absolute value of the golden tensor (of all its ranks and microbatches together), or, for a
    weighted sum, that of its terms times the sum of the weights: a sum that cancels has no relative accuracy.

    Attributes:
        relative: the bound; 0 asks for equal values.
        absolute: added to ``relative * scale``.
        bitwise: equal bytes are asked for; ``relative`` and ``absolute`` are then 0.
        basis: measurements behind the bound, plain JSON, such as ``{"perturbation": 2.1e-6, "kappa": 4}``.
        reason: one sentence for the reader of a failure.
        tensors: tolerances of single tensors of the quantity, by patterns of their names;
            the first that matches counts.

    Raises:
        ConfigError: for a bound that is negative or NaN.
    """

    relative: float
    absolute: float = 0.0
    bitwise: bool = False
    basis: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    tensors: Mapping[str, Tolerance] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, bound in (("relative", self.relative), ("absolute", self.absolute)):
            if not bound >= 0:  # NaN, too, which no error is beyond
                raise ConfigError(
                    f"a tolerance of {name}={bound} is not a bound: give a number that is not negative"
                )

    def of(self, name: str) -> Tolerance:
        """Return the tolerance of one tensor of the quantity."""
        found = (own for pattern, own in self.tensors.items() if fnmatchcase(name, pattern))
        return next(found, self)

    def scaled(self, factor: float) -> Tolerance:
        """Return this tolerance times ``factor``; exact ones stay exact."""
        return replace(
            self,
            relative=self.relative * factor,
            absolute=self.absolute * factor,
            tensors={name: own.scaled(factor) for name, own in self.tensors.items()},
        )


def tolerance_of(entry: ToleranceEntry) -> Tolerance | None:
    """Return the measured tolerance as the judge applies it; None for an entry that says that nothing can be judged."""
    if entry.relative is None:
        return None
    tensors = {
        pattern: own for pattern, row in entry.tensors.items() if (own := tolerance_of(row)) is not None
    }
    return Tolerance(entry.relative, entry.absolute, basis=entry.basis, reason=entry.reason, tensors=tensors)


EXACT = Tolerance(0.0, reason="integers and masks are compared exactly")
BITWISE = Tolerance(0.0, bitwise=True, reason="the order of arithmetic is the same, so every byte is")

Tolerances = Callable[[str], Tolerance | None]
"""The tolerance of each quantity; None where it is not judged."""
