"""Temporary folder that is removed with the process that made it, however that ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import weakref
from pathlib import Path
from tempfile import gettempdir
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
        while True:
            self.path = Path(gettempdir()) / f"{PREFIX}{os.urandom(8).hex()}"
            # before it is made: a signal may end this process at any place from there on
            self._end = weakref.finalize(self, _end, self.path, os.getpid(), handles := [])
            self.path.mkdir(0o700)
            handles.append(os.open(self.path, os.O_RDONLY | os.O_DIRECTORY))
            with contextlib.suppress(
                OSError
            ):  # without locks on the file system, no process removes it either
                fcntl.flock(handles[0], fcntl.LOCK_EX)
            if self.path.is_dir():
                return
            self._end()  # another process removed it as abandoned before it was locked

    def remove(self) -> None:
        """Remove the folder with all that it holds."""
        self._end()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def _end(path: Path, process: int, handles: list[int]) -> None:
    if os.getpid() != process:
        return  # a fork of the process that made it
    shutil.rmtree(path, ignore_errors=True)
    for handle in handles:
        os.close(handle)


def _remove_unless_locked(path: Path) -> None:
    with contextlib.suppress(OSError):  # locked, gone, or of another user
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(handle)
