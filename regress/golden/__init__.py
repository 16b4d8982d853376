"""The golden store: committed baselines, one folder per case, and the only ways to change them.

Names below load on first use.
"""

from typing import TYPE_CHECKING

from regress.lazy_imports import lazy_names

if TYPE_CHECKING:
    from regress.golden.case import GoldenCase as GoldenCase
    from regress.golden.manifest import Manifest as Manifest
    from regress.golden.manifest import ToleranceEntry as ToleranceEntry
    from regress.golden.store import GoldenStore as GoldenStore

_HOMES = {
    "GoldenStore": "store",
    "GoldenCase": "case",
    "Manifest": "manifest",
    "ToleranceEntry": "manifest",
}
__all__ = sorted(_HOMES)

if not TYPE_CHECKING:  # to a type checker a module with `__getattr__` has every name
    __getattr__ = lazy_names(__name__, _HOMES)
