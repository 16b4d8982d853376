"""Injection of faults into the engine, and their removal."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from regress.engine.build import Run

Prepare = Callable[["Run"], None]
"""Function that changes a run before its first step."""


class Patch:
    """Engine attributes that are replaced until the fault is over."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def setattr(self, owner: Any, name: str, value: Any) -> None:
        """Set an existing attribute."""
        self._stack.enter_context(mock.patch.object(owner, name, value))
