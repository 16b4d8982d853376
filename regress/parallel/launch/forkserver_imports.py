"""Imports for replays: about a thousand modules, which stay as long as the process does."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def imported_for_good() -> Iterator[None]:
    """Exclude everything imported inside from garbage collection for good.

    This shortens the imports and the end of the process; processes forked afterwards share the memory until
    it is written to.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
