"""Injection of faults into the engine, and their removal.

A fault is one function. Decorated by `around` or `in_place_of` it stands in place of a function of the engine, one that
takes ``patch: Patch`` replaces several, and one that takes ``run: Run`` breaks a run that is built and not yet started.
Each works in one process and on ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from regress.replay.run_changes import Prepare

Inject = Callable[[Any], None]
"""Function that breaks the engine, by a `Patch`, or a run."""


class Patch:
    """Engine attributes that are replaced until the fault is over."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def setattr(self, owner: Any, name: str, value: Any) -> None:
        """Set an existing attribute."""
        self._stack.enter_context(mock.patch.object(owner, name, value))

    def around(self, owner: Any, name: str, wrong: Callable[..., Any]) -> None:
        """Replace a function of a module, or a method or property of a class, by one that takes the right one first."""
        right = _right(owner, name)
        self.in_place_of(owner, name, lambda *args, **kwargs: wrong(right, *args, **kwargs))

    def in_place_of(self, owner: Any, name: str, wrong: Callable[..., Any]) -> None:
        """Replace a function of a module, or a method or property of a class."""
        kind = type(inspect.getattr_static(owner, name))
        self.setattr(owner, name, kind(wrong) if kind in (property, staticmethod, classmethod) else wrong)


def _right(owner: Any, name: str) -> Callable[..., Any]:
    """Return what an attribute calls: of a class, the function itself."""
    found = inspect.getattr_static(owner, name)
    if isinstance(found, property):
        return found.fget or found.__get__
    return found.__func__ if isinstance(found, staticmethod | classmethod) else getattr(owner, name)


def by(put: Callable[[Patch, Callable[..., Any]], None]) -> Callable[[Callable[..., Any]], Inject]:
    """Make the decorated function a fault: ``put(patch, function)`` puts it into the engine."""

    def decorate(wrong: Callable[..., Any]) -> Inject:
        def inject(patch: Patch) -> None:
            put(patch, wrong)

        inject.__name__, inject.__qualname__ = wrong.__name__, wrong.__qualname__
        inject.__module__, inject.__doc__ = wrong.__module__, wrong.__doc__
        return inject

    return decorate


def around(owner: Any, name: str) -> Callable[[Callable[..., Any]], Inject]:
    """Make the decorated function a fault: it stands in place of ``owner.name``, and takes the right one first."""
    return by(lambda patch, wrong: patch.around(owner, name, wrong))


def in_place_of(owner: Any, name: str) -> Callable[[Callable[..., Any]], Inject]:
    """Make the decorated function a fault: it stands in place of ``owner.name``."""
    return by(lambda patch, wrong: patch.in_place_of(owner, name, wrong))


def of_run(inject: Inject) -> bool:
    """Return True if a fault breaks a run, by the name of its argument: ``run`` or ``patch``."""
    return next(iter(inspect.signature(inject).parameters)) == "run"


@contextmanager
def injected(inject: Inject) -> Iterator[Prepare | None]:
    """Break the engine by a fault inside the context; yield the function that breaks each run, if any.

    Torch draws from a fixed seed inside, so that a fault that draws, such as dropout, is the same in every replay.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        torch.manual_seed(0)
        if of_run(inject):
            yield inject
        else:
            inject(Patch(stack))
            yield None
