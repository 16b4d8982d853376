"""Pattern: a property that all affected values have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Pattern:
    """A property that all affected values have in common.

    Attributes:
        id: for rules, such as ``"rank"`` or ``"class:packed_behind"``.
        words: for people, such as ``"only rank 1"``.
        numbers: its numbers, plain JSON.
    """

    id: str
    words: str
    numbers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def said(self) -> list[str]:
        """Texts that rules search: the ids of the changes that explain the values, or its words."""
        return [
            *self.numbers.get("changes", ()),
            *([self.numbers["id"]] if "id" in self.numbers else []),
        ] or [self.words]

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict; ``Pattern(**data)`` is its inverse."""
        return asdict(self)
