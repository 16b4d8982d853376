"""Bounds for two dumps: given by the caller, measured for a golden case, or by dtype and quantity."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from regress.compare.metrics import ulps
from regress.compare.quantities import Kind, quantity_named
from regress.compare.verdicts.tolerance import BITWISE, EXACT, Tolerance, Tolerances, tolerance_of
from regress.compare.verdicts.tolerance_overrides import Overrides
from regress.dump.numpy_arrays import DTYPES, is_float
from regress.golden.case_manifest import ToleranceEntry
from regress.golden.golden_case import GoldenCase

NOT_OF_WEIGHTS = ("param", "weights")
"""Quantities whose tolerance does not grow: parameters are what moved, and token weights are counted."""
OF_WEIGHTS = ("activations", "log_probs", "old_log_probs", "ref_log_probs", "entropy")
"""Quantities that answer to the weights themselves; all others are made of these."""
BACKWARD = (
    "logit_gradient",
    "gradient",
    "gradient_clipped",
    "grad_norm",
    "optimizer",
    "metrics",
    "step_metrics",
)
"""Quantities that the backward pass makes, or that hold what it makes: sums in which terms cancel.

They differ by more than log-probs do, as the table tells of them; other quantities change, relative to their size, by
no more than the log-prob that they are a function of.
"""
KAPPA = 4
"""Margin over the response to a difference, as over the noise floors of the golden cases."""

SEMANTICS = 1e-12
"""Relative bound in float64: correct layouts agree to 1e-13, the smallest real faults are at 1e-6."""


@dataclass(frozen=True)
class Bounds:
    """The tolerance of each quantity.

    Attributes:
        given: the same for all quantities that are not integers or masks; None for those of the table.
        measured: quantity -> precision -> entry of a golden case, before the table; ``case`` is its name.
        overrides: tolerances that the project sets by hand, before both.
        scale: factor on tolerances that are measured, of the table, or set by hand.
        precision: dtype that the actual side is declared to compute in, in place of those that are recorded.
        moved: distance of the weights that were computed with, relative to their size, which tolerances of the table
            grow by: they are responses to weights moved by one unit in the last place.
        shifted: largest difference of log-probs and entropies that was found with them; None where none was compared.
    """

    given: Tolerance | None = None
    measured: Mapping[str, Mapping[str, ToleranceEntry]] | None = None
    case: str = ""
    overrides: Overrides = field(default_factory=Overrides)
    scale: float = 1.0
    precision: str | None = None
    moved: float = 0.0
    shifted: float | None = None

    @classmethod
    def of_case(cls, case: GoldenCase, overrides: Overrides | None = None) -> Bounds:
        """Return the tolerances that were measured for a golden case."""
        return cls(overrides=overrides or Overrides()).over(case)

    def over(self, case: GoldenCase) -> Bounds:
        """Return these bounds with the measured tolerances of a case taking precedence over the table."""
        measured = {} if case.manifest is None else case.manifest.tolerances
        return replace(self, measured=measured, case=case.name)

    def of(self, quantity: str, dtypes: Sequence[str]) -> Tolerance:
        """Return the tolerance of a quantity.

        Args:
            dtypes: dtypes of the two tensors, and of the two models where known: the coarsest of them decides. Without
                a floating dtype the comparison is exact.
        """
        if quantity_named(quantity).exact or (dtypes and not any(map(_is_float, dtypes))):
            return BITWISE if self.given is not None and self.given.bitwise else EXACT
        if self.given is not None:
            return self.given
        dtype = self.precision or coarsest(dtypes)
        by_hand = self.overrides.over(lambda name: self._known(name, dtype), case=self.case, precision=dtype)(
            quantity
        )
        assert by_hand is not None
        return by_hand.scaled(self.scale)

    def dtype(self, quantity: str, name: str) -> str | None:
        """Return the name of the dtype that a tensor must have; None for any."""
        return None

    def _known(self, quantity: str, dtype: str) -> Tolerance:
        """Return the tolerance measured for the case, else that of the table."""
        entry = (self.measured or {}).get(quantity, {}).get(dtype)
        found = None if entry is None else tolerance_of(entry)
        if entry is not None and found is None:
            return Tolerance(math.inf, basis=entry.basis, reason=f"not judged: {entry.reason}")
        if found is None:
            return self._grown(_by_dtype(quantity, dtype), quantity)
        case = f" (golden case {self.case})" if self.case else ""
        return replace(found, reason=f"{found.reason}{case}")

    def _grown(self, tolerance: Tolerance, quantity: str) -> Tolerance:
        """Add the response to weights that lie apart, as far as the log-probs found tell that there is one."""
        if not self.moved or quantity in NOT_OF_WEIGHTS:
            return tolerance
        multiple = quantity_named(quantity).eps
        response = multiple * self.moved
        words = f"{multiple} x {self.moved:.2g}, by which the weights differ that it was computed with"
        if quantity not in OF_WEIGHTS and self.shifted is not None:
            times = KAPPA * (multiple // quantity_named("log_probs").eps if quantity in BACKWARD else 1)
            if times * self.shifted < response:
                response = times * self.shifted
                words = (
                    f"{times} x {self.shifted:.2g}, by which the log-probs differ that it is a function of"
                )
        basis = {**tolerance.basis, "moved": self.moved}
        relative = min(tolerance.relative + response, 0.5)
        return replace(tolerance, relative=relative, basis=basis, reason=f"{tolerance.reason}; and {words}")


@dataclass(frozen=True)
class StoredBounds(Bounds):
    """The tolerances of a replay, of which the quantity alone decides.

    Attributes:
        tolerances: tolerance of a quantity; None for one that is not judged.
        dtypes: name of the dtype that a tensor must have, by golden quantity and name; None for any.
    """

    tolerances: Tolerances = lambda _: None
    dtypes: Callable[[str, str], str | None] = lambda *_: None

    def of(self, quantity: str, dtypes: Sequence[str]) -> Tolerance:
        """Return the tolerance of a quantity that is judged."""
        return self.tolerances(quantity) or EXACT

    def dtype(self, quantity: str, name: str) -> str | None:
        """Return the name of the dtype that a tensor must have; None for any."""
        return self.dtypes(quantity, name)


def widened(tolerance: Tolerance, tensor: str, *sides: Iterable[Mapping[str, Any]]) -> Tolerance:
    """Add the errors that estimated values were recorded with, as ``meta["accuracy"]`` tells them.

    Args:
        sides: metadata of the records of each side.
    """
    error = 0.0
    for records in sides:
        accuracies = (meta.get("accuracy") for meta in records)
        error += max(
            (float(a[tensor]) for a in accuracies if isinstance(a, Mapping) and tensor in a), default=0.0
        )
    if not error or tolerance.bitwise:
        return tolerance
    reason = f"{tolerance.reason}; the values are estimates, good to {error:.2g} where they were recorded"
    return replace(tolerance, absolute=tolerance.absolute + error, reason=reason)


def coarsest(dtypes: Sequence[str]) -> str:
    """Return the floating dtype with the widest spacing; float64 where there is none."""
    floats = [name for name in dtypes if _is_float(name)]
    return max(floats, key=spacing, default="float64")


def _is_float(dtype: str) -> bool:
    return dtype in DTYPES and is_float(DTYPES[dtype])


def spacing(dtype: str) -> float:
    """Return the distance from 1 to the next number."""
    return ulps.spacing(DTYPES[dtype])


def _by_dtype(quantity: str, dtype: str) -> Tolerance:
    if dtype == "float64":
        reason = f"float64: correct layouts differ by rounding only, the bound is {SEMANTICS:g} of the largest value"
        return Tolerance(SEMANTICS, basis={"dtype": dtype}, reason=reason)
    coarse = spacing(dtype) > spacing("float32")
    named = quantity_named(quantity)
    multiple = named.coarse if coarse else named.eps
    bound = multiple * spacing(dtype)
    kind = "terms" if named.kind is Kind.SHARE else "values"
    reason = (
        f"{multiple} x the spacing of {dtype}, relative to the largest of the {kind}: not measured for this model; "
        "give --tolerances CASE, or --rtol and --atol"
    )
    basis = {"dtype": dtype, "eps": spacing(dtype), "multiple": multiple}
    return Tolerance(min(bound, 0.5), basis=basis, reason=reason)
