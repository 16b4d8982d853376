"""Probes of tolerances: faults that calibration and validation inject, each the smallest of its quantity in some case.

Which ones are here was measured: of 65 faults, in every golden case and precision, the error of the quantity in which
each begins, in multiples of that quantity's tolerance.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

from regress.errors import ReplayError
from regress.replay.fault_injection import Inject, injected
from regress.replay.run_changes import Prepare

_MODULES = ("loss_probes", "model_probes", "update_probes")


@dataclass(frozen=True)
class Probe:
    """A fault of the engine, as an example of what a tolerance has to detect.

    Attributes:
        variant: name of the variant in which it shows, of one process.
        small: True if validation tries it on other seeds: any kind of model shows it, and a tolerance may be too wide
            for it.
    """

    inject: Inject
    variant: str
    small: bool

    @property
    def name(self) -> str:
        """Name among all probes."""
        return self.inject.__name__

    @property
    def words(self) -> str:
        """Name as in tables: ``coefficients off``."""
        return self.name.replace("_", " ")

    @contextmanager
    def injected(self) -> Iterator[Prepare | None]:
        """Break the engine inside the context; yield the function that breaks each run, if any."""
        with injected(self.inject) as prepare:
            yield prepare


_KNOWN: dict[str, Probe] = {}


def probe(*, variant: str = "mbs4", small: bool = False) -> Callable[[Inject], Inject]:
    """Make the decorated fault a probe; the function itself stays what it is."""

    def register(inject: Inject) -> Inject:
        _KNOWN[inject.__name__] = Probe(inject, variant, small)
        return inject

    return register


@cache
def probes() -> Mapping[str, Probe]:
    """Return all probes by name."""
    for module in _MODULES:
        importlib.import_module(f"{__name__}.{module}")
    return _KNOWN


def probe_named(name: str) -> Probe:
    """Return the probe of that name.

    Raises:
        ReplayError: if there is none.
    """
    if name not in probes():
        raise ReplayError(f"there is no probe {name!r} among {', '.join(probes())}")
    return probes()[name]
