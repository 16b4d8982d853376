"""Dumps: the values of a training step, recorded as files with their own checksums.

`tap` records a value, a `Recorder` writes it off the critical path, a `DumpReader` reads it back bit for bit.
Names below load on first use, so that importing this package starts neither torch nor transformers.
"""

from typing import TYPE_CHECKING

from regress.lazy_imports import lazy_names

if TYPE_CHECKING:
    from regress.dump.dump_manifest import Manifest as Manifest
    from regress.dump.dump_reader import DumpReader as DumpReader
    from regress.dump.dump_reader import read as read
    from regress.dump.dump_reader import read_all as read_all
    from regress.dump.module_selection import matching_parameters as matching_parameters
    from regress.dump.module_selection import record_activations as record_activations
    from regress.dump.record import Record as Record
    from regress.dump.recorded_trajectories import read_trajectories as read_trajectories
    from regress.dump.recorder import Recorder as Recorder
    from regress.dump.taps import at as at
    from regress.dump.taps import recording as recording
    from regress.dump.taps import tap as tap
    from regress.dump.taps import tap_trajectories as tap_trajectories
    from regress.dump.taps import wanted as wanted
    from regress.dump.trajectory import Trajectory as Trajectory

_HOMES = {
    "Record": "record",
    "Trajectory": "trajectory",
    "Recorder": "recorder",
    "Manifest": "dump_manifest",
    "DumpReader": "dump_reader",
    "read": "dump_reader",
    "read_all": "dump_reader",
    "read_trajectories": "recorded_trajectories",
    "at": "taps",
    "recording": "taps",
    "tap": "taps",
    "tap_trajectories": "taps",
    "wanted": "taps",
    "record_activations": "module_selection",
    "matching_parameters": "module_selection",
}
__all__ = sorted(_HOMES)

if not TYPE_CHECKING:  # to a type checker a module with `__getattr__` has every name
    __getattr__ = lazy_names(__name__, _HOMES)
