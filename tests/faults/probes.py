"""Faults that calibration and validation try."""

from __future__ import annotations

from tests.faults.fault import Fault
from tests.faults.registry import corpus


def probes() -> list[Fault]:
    """Return the faults that are examples of what a tolerance has to detect."""
    return [fault for fault in corpus().values() if fault.calibration or fault.small]
