"""Capture: puts any PyTorch trainer under test, without a change to its code.

`record` hooks model and optimizer and writes an ordinary dump; `tap_batch` is the explicit form for values that
no hook can see. Names below load on first use, so that importing this package starts no torch.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "record": "recording",
    "tap_batch": "batch",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
