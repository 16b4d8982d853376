"""Explanation of a trainer: the loss that it really minimizes, read from its recorded token gradients.

Names below load on first use, so that importing this package starts no torch.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "Explanation": "statement",
    "Statement": "statement",
    "explain_dump": "explain",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
