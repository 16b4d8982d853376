"""Temporary folder that is removed with the process that made it, however that ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path
from tempfile import gettempdir, mkdtemp
from types import TracebackType

PREFIX = "regress-work-"


class Workspace:
    """New temporary folder, locked as long as this process lives; folders of killed processes are removed.

    Attributes:
        path: path of the folder, which a ``with`` statement returns, too.
    """

    def __init__(self) -> None:
        for left in Path(gettempdir()).glob(f"{PREFIX}*"):
            _remove_unless_locked(left)
        self.path, self._handle = _new()

    def remove(self) -> None:
        """Remove the folder with all that it holds."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._handle)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def _new() -> tuple[Path, int]:
    """Return a folder and the handle that holds its lock."""
    while True:
        path = Path(mkdtemp(prefix=PREFIX))
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        with contextlib.suppress(OSError):  # without locks on the file system, no process removes it either
            fcntl.flock(handle, fcntl.LOCK_EX)
        if path.is_dir():
            return path, handle
        os.close(handle)  # another process removed it as abandoned before it was locked


def _remove_unless_locked(path: Path) -> None:
    with contextlib.suppress(OSError):  # locked, gone, or of another user
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(handle)
