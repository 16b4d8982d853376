"""The tolerance of a quantity at a precision, as the manifest keeps it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ToleranceEntry:
    """A measured bound on ``max |actual - golden| / max |golden|``, with its basis and reason.

    Attributes:
        relative: the bound; None where the quantity cannot be judged at this precision, which `reason` explains.
        absolute: added to ``relative * scale``.
        basis: what was measured, plain JSON, such as ``{"perturbation": 2.1e-6, "kappa": 4}``.
        reason: one sentence for the reader of a failure.
    """

    relative: float | None
    absolute: float = 0.0
    basis: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""

    def problem(self) -> str | None:
        """What is wrong with it, as a clause, or None."""
        numbers: dict[str, object] = {"absolute": self.absolute}
        if self.relative is not None:
            numbers["relative"] = self.relative
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                return f"has {name} = {value!r}, but a tolerance is a finite number of at least 0"
        if not isinstance(self.reason, str) or not self.reason.strip():
            return "has no reason, but a tolerance is never set without one"
        return None

    def to_json(self) -> dict[str, Any]:
        """A plain dict, the inverse of `from_json`."""
        return {
            "relative": None if self.relative is None else float(self.relative),
            "absolute": float(self.absolute),
            "basis": dict(self.basis),
            "reason": self.reason,
        }

    @classmethod
    def from_json(cls, data: Any) -> ToleranceEntry:
        """Rebuild an entry; raises `ValueError` for anything malformed."""
        if not isinstance(data, Mapping) or data.keys() != {"relative", "absolute", "basis", "reason"}:
            raise ValueError("a tolerance does not consist of relative, absolute, basis and reason")
        if not isinstance(data["basis"], Mapping):
            raise ValueError("the basis of a tolerance is no mapping")  # noqa: TRY004 - one kind for all damage
        entry = cls(**data)
        if (problem := entry.problem()) is not None:
            raise ValueError(f"a tolerance {problem}")
        return entry
