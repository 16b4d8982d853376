"""Selection of the tensors of a comparison."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from regress.errors import meant

_PARTS = re.compile(r"[/.*?\[\]]+")


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

    def meant(self, names: Iterable[str]) -> str:
        """Return ``; did you mean a?`` for a part of a pattern that is none of any name; empty where none is near."""
        known = {part for name in names for part in (name, *_PARTS.split(name))}
        asked = (part for pattern in self.patterns for part in _PARTS.split(pattern))
        hints = (meant(part, known) for part in asked if part and part not in known)
        near = next(filter(None, hints), "")
        return f"; {near.rstrip()}" if near else ""

    def has(self, quantity: str, name: str) -> bool:
        """Return True if a tensor is asked for."""
        if not self.patterns:
            return True
        texts = (quantity, name, f"{quantity}/{name}")
        return any(fnmatchcase(text, pattern) for text in texts for pattern in self.patterns)
