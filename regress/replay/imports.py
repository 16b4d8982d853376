"""Imports for replays: about a thousand modules, which stay as long as the process does."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def imported_for_good() -> Iterator[None]:
    """Exclude everything imported inside from garbage collection for good.

    Importing takes less time, and so does the end of the process; processes forked afterwards share the memory as long
    as nobody writes to it.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
