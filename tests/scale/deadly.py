"""A fault that processes carry to one another, so it stands in a module that all of them can import."""

from __future__ import annotations

import os
import signal


class Deadly:
    """A selection of tensors that ends every process but the one that made it."""

    pattern = ""

    def __init__(self) -> None:
        self.owner = os.getpid()

    def has(self, quantity: str, name: str) -> bool:
        """Return True, for every tensor, in the process that made the selection; kill any other process."""
        if os.getpid() != self.owner:
            os.kill(os.getpid(), signal.SIGKILL)
        return True
