"""Part of the objective: one choice of one of its fields, with formula and source. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Part:
    """One choice of a field of the objective.

    Attributes:
        text: formula, in the words of the field's help.
        source: paper, or package with version and function.
        home: ``module:function`` in this package that computes it; empty where the rule is a branch of another.
        reads: fields that it reads and that are refused where no chosen part reads them.
        needs: arguments beyond those of every part of its kind.
    """

    text: str
    source: str
    home: str = ""
    reads: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    def function(self) -> Any:
        """Import and return the function that computes the part."""
        return imported(self.home)


Parts = Mapping[str, Part]


def imported(home: str) -> Any:
    """Return the function of this package that ``module:function`` names."""
    module, _, name = home.partition(":")
    return getattr(import_module(f"regress.grpo.{module}"), name)


def described(parts: Parts) -> str:
    """Return the parts as one text: ``name formula, name formula``."""
    return "; ".join(f"{name} {part.text}" for name, part in parts.items())
