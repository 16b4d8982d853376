"""Tolerance of a quantity at a precision, as the manifest stores it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_KEYS = {"relative", "absolute", "basis", "reason"}


@dataclass(frozen=True)
class ToleranceEntry:
    """A measured bound on ``max |actual - golden| <= relative * max |golden| + absolute``, with its basis and reason.

    Attributes:
        relative: the bound; None where the quantity cannot be judged at this precision, which `reason` explains.
        absolute: added to ``relative * scale``.
        basis: measurements, as plain JSON, such as ``{"perturbation": 2.1e-6, "kappa": 4}``.
        reason: one sentence for the reader of a failure.
        tensors: bounds of tensors that cannot share that of their quantity, by patterns of their names.
    """

    relative: float | None
    absolute: float = 0.0
    basis: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    tensors: Mapping[str, ToleranceEntry] = field(default_factory=dict)

    @property
    def bound(self) -> str:
        """Bound in words: `2.3e-06 of the scale`, `4.0e-09`, `not judged`."""
        if self.relative is None:
            return "not judged"
        parts = [f"{self.relative:.2g} of the scale"] if self.relative or not self.absolute else []
        return " + ".join(parts + ([f"{self.absolute:.2g}"] if self.absolute else []))

    def problem(self) -> str | None:
        """Return the problem of the tolerance as a clause, or None."""
        numbers: dict[str, object] = {"absolute": self.absolute}
        if self.relative is not None:
            numbers["relative"] = self.relative
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                return f"has {name} = {value!r}, but a tolerance is a finite number of at least 0"
        if not isinstance(self.reason, str) or not self.reason.strip():
            return "has no reason, but a tolerance is never set without one"
        for pattern, entry in self.tensors.items():
            if entry.tensors or entry.relative is None:
                return f"has one for {pattern} that is no plain bound: give it relative and absolute"
            if (problem := entry.problem()) is not None:
                return f"has one for {pattern} that {problem}"
        return None

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict that `from_json` reads."""
        tensors = {pattern: entry.to_json() for pattern, entry in self.tensors.items()}
        return {
            "relative": None if self.relative is None else float(self.relative),
            "absolute": float(self.absolute),
            "basis": dict(self.basis),
            "reason": self.reason,
            **({"tensors": tensors} if tensors else {}),
        }

    @classmethod
    def from_json(cls, data: Any) -> ToleranceEntry:
        """Rebuild an entry; raises `ValueError` for anything malformed."""
        if not isinstance(data, Mapping) or data.keys() - {"tensors"} != _KEYS:
            raise ValueError("a tolerance does not consist of relative, absolute, basis and reason")
        if not isinstance(data["basis"], Mapping):
            raise ValueError("the basis of a tolerance is no mapping")  # noqa: TRY004 - one kind for all damage
        own = data.get("tensors", {})
        if not isinstance(own, Mapping):
            raise ValueError("the tensors of a tolerance are no mapping")  # noqa: TRY004 - one kind for all damage
        tensors = {pattern: cls.from_json(entry) for pattern, entry in own.items()}
        entry = cls(**{**data, "tensors": tensors})
        if (problem := entry.problem()) is not None:
            raise ValueError(f"a tolerance {problem}")
        return entry
