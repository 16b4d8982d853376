"""Selection of the tensors of a comparison."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Selection:
    """All tensors, or those that any of some patterns names.

    Attributes:
        pattern: pattern of a quantity (``log_probs``), a tensor (``*q_proj*``) or both (``gradient/model.layers.0.*``).
        more: further ones.
    """

    pattern: str = ""
    more: tuple[str, ...] = ()

    @classmethod
    def of(cls, *patterns: str) -> Selection:
        """Return the selection of some patterns; empty ones name nothing."""
        first, *more = [pattern for pattern in patterns if pattern] or [""]
        return cls(first, tuple(more))

    @property
    def patterns(self) -> tuple[str, ...]:
        """All patterns; none if everything is selected."""
        return (self.pattern, *self.more) if self.pattern else ()

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
