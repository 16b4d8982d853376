"""Selection of the tensors of a comparison."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Selection:
    """All tensors, or those that a pattern names.

    Attributes:
        pattern: pattern of a quantity (``log_probs``), a tensor (``*q_proj*``) or both (``gradient/model.layers.0.*``).
    """

    pattern: str = ""

    def has(self, quantity: str, name: str) -> bool:
        """Return True if a tensor is asked for."""
        if not self.pattern:
            return True
        return any(fnmatchcase(text, self.pattern) for text in (quantity, name, f"{quantity}/{name}"))
