"""True float64 values of what another trainer computes, made by this package's engine.

``truth`` computes those of an exported golden case, under its own objective or any other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regress.lazy_imports import lazy_names

if TYPE_CHECKING:
    from regress.oracle.exported_truth import truth as truth

__all__ = ["truth"]

if not TYPE_CHECKING:  # to a type checker a module with `__getattr__` has every name
    __getattr__ = lazy_names(__name__, {"truth": "exported_truth"})
