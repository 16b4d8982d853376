"""The one registry of faults: every module below this package is imported, so a new fault needs no other edit.

The package `trials` holds what tries them, and none.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache

import tests.faults
from regress.errors import ReplayError
from regress.replay.run_changes import Prepare
from tests.faults.fault import REGISTERED, Fault


@cache
def corpus() -> Mapping[str, Fault]:
    """Return all faults by name, in the order of their categories."""
    for module in pkgutil.walk_packages(tests.faults.__path__, "tests.faults."):
        if not module.name.startswith("tests.faults.trials"):
            importlib.import_module(module.name)
    return dict(sorted(REGISTERED.items(), key=lambda item: (item[1].category, item[0])))


def faults_named(patterns: Sequence[str]) -> list[Fault]:
    """Return the faults whose names match any of these patterns, or all of them.

    Raises:
        ReplayError: for a pattern that matches no fault.
    """
    known = corpus()
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            near = get_close_matches(pattern, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "python -m tests.faults list shows all of them"
            raise ReplayError(f"there is no fault {pattern!r}: {hint}")
    return [one for name, one in known.items() if not patterns or any(fnmatchcase(name, p) for p in patterns)]


def fault_named(name: str) -> Fault:
    """Return the fault of that name.

    Raises:
        ReplayError: if there is none.
    """
    return next(one for one in faults_named([name]) if one.name == name)


@contextmanager
def installed(name: str | None) -> Iterator[Prepare | None]:
    """Break the engine of this process by a fault, inside the context; None breaks nothing.

    Yields:
        What breaks each run that was built; None where the fault is one of the code.
    """
    if name is None:
        yield None
        return
    with fault_named(name).injected() as prepare:
        yield prepare
