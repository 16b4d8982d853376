"""Faults, and their injection into and removal from the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from regress.engine.build import Run

Prepare = Callable[[Run], None]


class Patch:
    """Engine attributes that are replaced until the fault is over."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def setattr(self, owner: Any, name: str, value: Any) -> None:
        """Set an existing attribute."""
        self._stack.enter_context(mock.patch.object(owner, name, value))


@dataclass(frozen=True)
class Fault:
    """Bug: ``code`` breaks the engine's code, or ``run`` a run that was built and has not started.

    Attributes:
        variant: under which it can show.
        small: True if it is of the size that a tolerance may be too wide for, and shows in every kind of
            model.
    """

    code: Callable[[Patch], None] | None = None
    run: Prepare | None = None
    variant: str = "mbs4"
    small: bool = False

    @property
    def inject(self) -> Callable[[Any], None]:
        """Function that injects the fault."""
        found = self.code or self.run
        assert found is not None
        return found

    @property
    def name(self) -> str:
        """Name as in tables: ``population deviation``."""
        return self.inject.__name__.replace("_", " ")

    @property
    def what(self) -> str:
        """One sentence on the fault; its name where the function has no docstring."""
        return (self.inject.__doc__ or self.name).split("\n")[0]

    @contextmanager
    def injected(self) -> Iterator[Prepare | None]:
        """Break the engine inside the context; yield the function that prepares each run to be broken, if any."""
        with ExitStack() as stack:
            if self.code is not None:
                self.code(Patch(stack))
            yield self.run
