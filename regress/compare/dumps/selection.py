"""Selection of the tensors of a comparison."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Selection:
    """All tensors, or those that any of some patterns names.

    Attributes:
        patterns: patterns of a quantity (``log_probs``), a tensor (``*q_proj*``) or both
            (``gradient/model.layers.0.*``); none if everything is selected.
    """

    patterns: tuple[str, ...] = ()

    @classmethod
    def of(cls, *patterns: str) -> Selection:
        """Return the selection of some patterns; empty ones name nothing."""
        return cls(tuple(pattern for pattern in patterns if pattern))

    @property
    def words(self) -> str:
        """The patterns, as they are given on the command line."""
        return " ".join(f"--only {pattern}" for pattern in self.patterns)

    def has(self, quantity: str, name: str) -> bool:
        """Return True if a tensor is asked for."""
        if not self.patterns:
            return True
        texts = (quantity, name, f"{quantity}/{name}")
        return any(fnmatchcase(text, pattern) for text in texts for pattern in self.patterns)
