"""The golden store: committed baselines, one folder a case, and the only ways to change them.

Names below load on first use.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "GoldenStore": "store",
    "GoldenCase": "case",
    "Manifest": "manifest",
    "ToleranceEntry": "tolerance",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
