"""The golden store: committed baselines, one folder per case, and the only ways to change them.

Names below load on first use.
"""

from typing import TYPE_CHECKING

from regress.lazy_imports import lazy_names

if TYPE_CHECKING:
    from regress.golden.case_manifest import Manifest as Manifest
    from regress.golden.case_manifest import ToleranceEntry as ToleranceEntry
    from regress.golden.golden_case import GoldenCase as GoldenCase
    from regress.golden.golden_directory import GoldenStore as GoldenStore

_HOMES = {
    "GoldenStore": "golden_directory",
    "GoldenCase": "golden_case",
    "Manifest": "case_manifest",
    "ToleranceEntry": "case_manifest",
}
__all__ = sorted(_HOMES)

if not TYPE_CHECKING:  # to a type checker a module with `__getattr__` has every name
    __getattr__ = lazy_names(__name__, _HOMES)
