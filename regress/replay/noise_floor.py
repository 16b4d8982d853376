"""Tolerances of a quantity from the measurements of its tensors, with their bases and reasons.

Most tensors of a quantity answer to rounding alike, so they share one relative bound: the quantity's entry. Tensors
that cannot share it are ill-conditioned, and get an absolute bound of their own from their own perturbation: those
that are zero but for rounding (a bound relative to themselves would pass zeros, and one relative to the worst of them
would pass anything elsewhere), and those that answer far more strongly than the others, such as the bias of attention
keys, which softmax does not depend on, after an update by Adam.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch

from regress.compare.quantities import quantity_named
from regress.compare.verdicts.tolerance import Tolerance, tolerance_of
from regress.engine.numeric_types import DTYPES
from regress.golden.case_manifest import ToleranceEntry
from regress.replay.variant import Precision

KAPPA: Mapping[Precision, float] = {Precision.FLOAT64: 4.0, Precision.FLOAT32: 4.0, Precision.BFLOAT16: 3.0}
"""Factor on the noise floor. Held-out measurement: no healthy float32 run exceeded 3.0, no bfloat16 run 2.2."""

SEMANTICS = 1e-12
"""Bound in float64: correct layouts agree to 1e-14, the smallest real bugs are at 1e-2."""

BLIND = 1.0
"""Relative bound that passes a tensor of zeros."""

APART = 32.0
"""Response, in multiples of the median of the quantity, above which a tensor is ill-conditioned. Measured
on nine cases in float32: the strongest lie at 1 to 12 times the median, the bias of attention keys of GPT-2
at 65.
"""

WEIGHTS, DTYPE, SPACING = (
    "weights moved by one ulp",
    "error against float64",
    "an eighth of the dtype's spacing",
)
"""Names of the three measurements, the largest of which is the noise floor."""

_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class Response:
    """Measured response of one tensor, over all updates, layouts and seeds.

    Attributes:
        perturbation, dtype_error: largest difference over the scale of the tensor.
        absolute: the largest of these differences itself.
    """

    perturbation: float = 0.0
    dtype_error: float = 0.0
    absolute: float = 0.0

    @property
    def relative(self) -> float:
        """Larger of perturbation and dtype error."""
        return max(self.perturbation, self.dtype_error)

    def joined(self, other: Response) -> Response:
        """Return the larger value of each measurement."""
        return Response(
            max(self.perturbation, other.perturbation),
            max(self.dtype_error, other.dtype_error),
            max(self.absolute, other.absolute),
        )


@dataclass(frozen=True)
class Floor:
    """Noise floor of one quantity in one precision.

    Attributes:
        shared: largest response of the tensors that share a relative bound; None where there is no such
            tensor.
        ill: responses of the ill-conditioned tensors, by patterns of their names.
        seeds: perturbations that were measured.
    """

    quantity: str
    precision: Precision
    shared: Response | None
    seeds: int
    ill: Mapping[str, Response] = field(default_factory=dict)

    @classmethod
    def of(cls, quantity: str, precision: Precision, tensors: Mapping[str, Response], seeds: int) -> Floor:
        """Build the noise floor, with the ill-conditioned tensors set apart."""
        kappa, eighth = KAPPA[precision], spacing(quantity, precision) / 8
        # tensors that rounding leaves alone, such as counters, tell nothing about the response of the
        # others
        moved = [max(row.relative, eighth) for row in tensors.values() if row.relative]
        median = statistics.median_low(moved) if moved else eighth
        limit = SEMANTICS / kappa if precision is Precision.FLOAT64 else min(BLIND / kappa, APART * median)
        apart = [name for name, row in tensors.items() if row.relative >= limit]
        ill: dict[str, Response] = {}
        for name in apart:
            pattern = _pattern(name, apart, tensors)
            ill[pattern] = ill.get(pattern, Response()).joined(tensors[name])
        rest = [row for name, row in tensors.items() if name not in apart]
        return cls(quantity, precision, _joined(rest), seeds, ill)

    @property
    def floor(self) -> float:
        """Largest of the response to an ulp, the error of the dtype, and an eighth of its spacing."""
        eighth = spacing(self.quantity, self.precision) / 8
        return eighth if self.shared is None else max(self.shared.relative, eighth)

    @property
    def source(self) -> str:
        """Name of the measurement that is the largest."""
        shared = self.shared or Response()
        sources = {
            WEIGHTS: shared.perturbation,
            DTYPE: shared.dtype_error,
            SPACING: spacing(self.quantity, self.precision) / 8,
        }
        return max(sources, key=sources.__getitem__)

    @property
    def entry(self) -> ToleranceEntry:
        """Entry for the manifest."""
        own = {pattern: self._ill_entry(row) for pattern, row in self.ill.items()}
        if self.shared is None:  # a tensor that no pattern names gets the bound of the worst
            worst = self._ill_entry(_joined(self.ill.values()) or Response())
            return ToleranceEntry(0.0, worst.absolute, worst.basis, worst.reason, own if len(own) > 1 else {})
        return ToleranceEntry(self._relative, 0.0, self._basis(self.shared), self._reason, own)

    @property
    def tolerance(self) -> Tolerance:
        """Tolerance that the judge applies."""
        found = tolerance_of(self.entry)
        assert found is not None
        return found

    @property
    def _relative(self) -> float:
        return SEMANTICS if self.precision is Precision.FLOAT64 else KAPPA[self.precision] * self.floor

    @property
    def _reason(self) -> str:
        if self.precision is Precision.FLOAT64:
            return (
                f"true float64: correct layouts differ by rounding only (floor {self.floor:.1e} here), "
                f"errors of the mathematics are above 1e-2; the bound is {SEMANTICS:g}"
            )
        return f"{KAPPA[self.precision]:g} times the noise floor of {self.floor:.1e} ({self.source})"

    def _ill_entry(self, row: Response) -> ToleranceEntry:
        kappa = KAPPA[self.precision]
        reason = (
            f"ill-conditioned: rounding moves it by up to {row.relative:.1e} of its size, so its bound is absolute: "
            f"{kappa:g} times what it was moved by ({row.absolute:.1e})"
        )
        basis = self._basis(row) | {"absolute": row.absolute, "ill_conditioned": True}
        return ToleranceEntry(0.0, kappa * row.absolute, basis, reason)

    def _basis(self, row: Response) -> dict[str, Any]:
        return {
            "perturbation": _finite(row.perturbation),
            "dtype_error": _finite(row.dtype_error),
            "seeds": self.seeds,
            "kappa": KAPPA[self.precision],
        }


def spacing(quantity: str, precision: Precision) -> float:
    """Return the unit spacing of the dtype that a quantity is computed in."""
    lowered = quantity_named(quantity).native or precision is Precision.FLOAT64
    return float(torch.finfo(DTYPES[precision.dtype] if lowered else torch.float32).eps)


def _joined(rows: Iterable[Response]) -> Response | None:
    found: Response | None = None
    for row in rows:
        found = row if found is None else found.joined(row)
    return found


def _pattern(name: str, apart: Iterable[str], tensors: Mapping[str, Response]) -> str:
    """Return the name without its layer number, if the same tensors of all other layers are set apart, too."""
    pattern = _LAYER.sub("*", name)
    alike = {other for other in tensors if fnmatchcase(other, pattern)}
    return pattern if alike <= set(apart) else name


def _finite(value: float) -> float | None:
    """Return the value for JSON; None for the response of a tensor of zeros, which has no relative size."""
    return value if value < float("inf") else None
