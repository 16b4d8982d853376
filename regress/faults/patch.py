"""What a fault is, and how it is put into the engine and taken out again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from regress.engine.build import Run

Prepare = Callable[[Run], None]


class Patch:
    """Attributes of the engine that are something else until the fault is over."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def setattr(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute that exists."""
        self._stack.enter_context(mock.patch.object(owner, name, value))


@dataclass(frozen=True)
class Fault:
    """A bug: ``code`` breaks the engine's code, or ``run`` a run that was built and has not started.

    Attributes:
        variant: under which it can show.
        small: whether it is of the size that a tolerance may be too wide for, and shows in every kind of model.
    """

    code: Callable[[Patch], None] | None = None
    run: Prepare | None = None
    variant: str = "mbs4"
    small: bool = False

    @property
    def inject(self) -> Callable[[Any], None]:
        """What breaks it."""
        found = self.code or self.run
        assert found is not None
        return found

    @property
    def name(self) -> str:
        """As in tables: ``population deviation``."""
        return self.inject.__name__.replace("_", " ")

    @property
    def what(self) -> str:
        """One sentence, where the name does not say it."""
        return (self.inject.__doc__ or self.name).split("\n")[0]

    @contextmanager
    def injected(self) -> Iterator[Prepare | None]:
        """The engine is broken inside; what comes out has to prepare each run that is to be broken."""
        with ExitStack() as stack:
            if self.code is not None:
                self.code(Patch(stack))
            yield self.run
