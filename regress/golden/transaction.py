"""Transaction on a golden directory: the only way to change goldens and pending updates."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from regress.dump.files import Stamp, stamp_of
from regress.errors import GoldenError
from regress.golden.files import locked, remedy, unwritable
from regress.golden.journal import UnfinishedError, prepare, roll_forward, settle_locked, undone
from regress.golden.names import JOURNAL


class Changes:
    """Files that a transaction writes and removes below `root`; nothing changes before it ends."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._new: dict[str, bytes] = {}
        self._gone: dict[str, None] = {}

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> Stamp:
        """Write these bytes to a file when the transaction ends; files appear in the order of these calls."""
        name, data = self._name(path), b"".join(chunks)
        self._gone.pop(name, None)
        self._new[name] = data
        return stamp_of(data)

    def remove(self, path: Path) -> None:
        """Remove a file, if present, and the folders that this leaves empty, after all files are written."""
        name = self._name(path)
        self._new.pop(name, None)
        if os.path.lexists(path):
            self._gone[name] = None

    def add(self, other: Changes) -> None:
        """Add the changes of another planned transaction on the same directory."""
        self._new |= other._new
        self._gone |= other._gone

    def paths(self) -> list[Path]:
        """Return the files to write."""
        return [self.root / name for name in self._new]

    def files(self) -> dict[str, bytes | None]:
        """Return the new bytes of each file, by its path below `root`; None for one that is removed."""
        return {**self._new, **dict.fromkeys(self._gone)}

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()


@contextlib.contextmanager
def transaction(root: Path) -> Iterator[Changes]:
    """Change files below a golden directory, all or none; an exception within the `with` changes nothing.

    The lock of the directory is held, and an earlier interrupted update is settled first.

    Raises:
        GoldenError: if the directory cannot be read or written; it is then as it was before, or the sentence says that
            the next command finishes the update.
    """
    with locked(root):
        settle_locked(root)
        if os.path.lexists(root / JOURNAL):
            raise GoldenError(
                f"{root / JOURNAL} is in the way of an update, and cannot be removed: remove it"
            )
        changes = Changes(root)
        yield changes
        _carry_out(changes)


def _carry_out(changes: Changes) -> None:
    root, files = changes.root, changes.files()
    if not files:
        return
    before = {name: _content(root / name) for name in files}
    steps = prepare(root, files, before)
    try:
        roll_forward(root, steps)
    except UnfinishedError as found:
        if undone(root, steps, before):
            raise unwritable(found.path, found.error) from found.error
        raise GoldenError(
            f"{found.path} cannot be written ({found.error.strerror}) in the middle of an update, which the next "
            f"command that opens {root} finishes: {remedy(found.error)}"
        ) from found.error


def _content(path: Path) -> bytes | None:
    """Return the bytes of a file that is to be replaced, None where there is none; raises `GoldenError`."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise unwritable(path, error) from error
