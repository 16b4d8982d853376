"""Changes of a run: functions that prepare it, and contexts around it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regress.engine.run_construction import Run

Prepare = Callable[["Run"], None]
"""Function that changes a run before its first step, such as by a perturbation of its weights."""
Around = Callable[[], AbstractContextManager[Prepare | None]]
"""Function that is called in every rank: its context is around the whole run, and what it yields prepares the run."""
