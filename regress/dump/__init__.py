"""Dumps: what a training step computed, recorded as files that verify themselves.

`tap` marks a value, a `Recorder` writes it off the critical path, a `DumpReader` reads it back bit for bit.
Names below load on first use, so that importing this package starts neither torch nor transformers.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "Record": "record",
    "Trajectory": "trajectory",
    "Recorder": "recorder",
    "Manifest": "manifest",
    "DumpReader": "reader",
    "read": "reader",
    "read_all": "reader",
    "read_trajectories": "recorded",
    "at": "taps",
    "recording": "taps",
    "tap": "taps",
    "tap_trajectories": "taps",
    "wanted": "taps",
    "record_activations": "hooks",
    "matching_parameters": "hooks",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
