"""Probes of tolerances: faults that calibration and validation inject, as other parts register them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cache
from typing import Protocol

from regress.errors import ReplayError
from regress.plugins import PROBES, load, registered
from regress.replay.around import Prepare


class Probe(Protocol):
    """A fault of the engine, as an example of what a tolerance has to detect."""

    @property
    def name(self) -> str:
        """Name among all probes."""

    @property
    def words(self) -> str:
        """Name as in tables."""

    @property
    def variant(self) -> str:
        """Name of the variant in which it shows, of one process."""

    @property
    def calibration(self) -> bool:
        """True if calibration tries it."""

    @property
    def small(self) -> bool:
        """True if validation tries it on other seeds: a tolerance may be too wide for it."""

    def injected(self) -> AbstractContextManager[Prepare | None]:
        """Break the engine inside the context; yield the function that breaks each run, if any."""


@cache
def probes() -> Mapping[str, Probe]:
    """Return all probes by name; none where no part registers any."""
    return {probe.name: probe for point in registered(PROBES).values() for probe in load(point)()}


def probe_named(name: str) -> Probe:
    """Return the probe of that name.

    Raises:
        ReplayError: if there is none.
    """
    if name not in probes():
        raise ReplayError(f"there is no probe {name!r} among {', '.join(probes()) or 'none'}")
    return probes()[name]
