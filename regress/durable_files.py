"""Keep files whole: each is there or not, writers wait for one another, and several files change all or none.

* One file: `write` lays it under a temporary name beside its place, waits for the disk, and renames it.
* One folder: `publish` gives a finished folder its name, and `recover` cleans up after a process that was killed.
* Several files below one folder: a `Batch` lays the new ones into ``FOLDER/.update``. That folder gets its name by one
  rename, which decides the update; `finish` then moves every file to its place, at once or, after a kill, when the
  folder is opened next.
* One writer at a time: `locked`.

All functions raise `OSError`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

TEMPORARY = ".partial-"  # a killed writer leaves files and folders with this prefix; readers ignore them
UPDATE = ".update"  # files of a decided update that are not in their places yet
_LAID = f"{TEMPORARY}update"  # the same before it is decided
_LIST = (
    "files.json"  # within it: each path in order, with the name of its new bytes there, or null to remove it
)
_HALF_A_FILE = re.compile(rf"{re.escape(TEMPORARY)}(\d{{1,10}})-(.+)", re.DOTALL)
_HALF_DONE = re.compile(r"\.(partial|replaced|pruned)-(.+)", re.DOTALL)

Chunks = Iterable[bytes | memoryview]


@dataclass(frozen=True)
class Stamp:
    """Identify the content of a file by its size in bytes and the SHA-256 of its bytes in hex."""

    size: int
    sha256: str

    @classmethod
    def of(cls, data: bytes) -> Stamp:
        """Return the stamp of a file with this content."""
        return cls(len(data), hashlib.sha256(data).hexdigest())


def write(path: Path, chunks: Chunks, *, fsync: bool = True, keep_mode: bool = False) -> Stamp:
    """Write a file so that `path` holds either all of it or what it held before.

    A device, a named pipe or a socket is never replaced.

    Args:
        fsync: wait until the disk has it, so that this holds after a power failure, too.
        keep_mode: give the file the permissions of the one that it replaces.
    """
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _refuse_special(path)
        stamp = _fill(temporary, chunks, fsync)
        if keep_mode:
            _copy_mode(path, temporary)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    return stamp


def _refuse_special(path: Path) -> None:
    """Raise `OSError` for what a rename must not replace; a link and a regular file are replaced."""
    with contextlib.suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode) or stat.S_ISDIR(mode)):
            raise OSError(errno.EINVAL, "it is a device, a named pipe or a socket")


def _fill(path: Path, chunks: Chunks, fsync: bool = True) -> Stamp:
    digest, size = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file:
        for chunk in chunks:
            digest.update(chunk)
            size += len(chunk)
            rest = memoryview(chunk)
            while rest:
                rest = rest[os.write(file.fileno(), rest) :]
        if fsync:
            os.fsync(file.fileno())
    return Stamp(size, digest.hexdigest())


def copy(source: Path, target: Path) -> None:
    """Copy a file, a link, or a folder with all it holds, in place of what is there; whole, or not at all."""
    temporary = target.with_name(f"{TEMPORARY}{os.getpid()}-{target.name}")
    remove(temporary)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir() and not source.is_symlink():
            shutil.copytree(source, temporary, symlinks=True)
        else:
            shutil.copy2(source, temporary, follow_symlinks=False)
        publish(temporary, target)
    except OSError:
        remove(temporary)
        raise


def publish(working: Path, final: Path) -> None:
    """Give a finished file or folder its name once the disk has it; a folder that had the name steps aside until then.

    After a kill, `recover` brings that folder back.
    """
    _sync_all(working)
    replaced = final.with_name(f".replaced-{final.name}")
    if final.is_dir() and not final.is_symlink():
        remove(replaced)
        final.rename(replaced)
    try:
        working.rename(final)
    except OSError:
        if replaced.exists() and not final.exists():
            replaced.rename(final)
        raise
    sync(final.parent)
    with contextlib.suppress(OSError):  # it hinders nobody
        remove(replaced)


def discard(folder: Path) -> None:
    """Remove a folder, which loses its name before its first file goes."""
    doomed = folder.with_name(f".pruned-{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def recover(home: Path, ours: Callable[[str], bool], whole: Callable[[Path], bool]) -> None:
    """Finish what a killed writer left: a replaced folder comes back, and working folders and halves of files go.

    Args:
        ours: returns True for a name that the caller publishes or writes here.
        whole: returns True for a folder that lacks nothing.
    """
    for path in home.iterdir() if home.is_dir() else ():
        half = _HALF_A_FILE.fullmatch(path.name)
        if half is not None and ours(half[2]) and path.is_file() and not _runs(int(half[1])):
            path.unlink(missing_ok=True)
        match = _HALF_DONE.fullmatch(path.name)
        if match is None or not ours(match[2]):
            continue
        final = home / match[2]
        if match[1] == "replaced" and not final.exists() and whole(path):
            path.rename(final)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _runs(process: int) -> bool:
    """Return True if a process of this machine has this number."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        return True
    return True


def remove(path: Path) -> None:
    """Remove a file, or a folder with all it holds; nothing happens where there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(folder: Path) -> None:
    """Make renames within a folder outlast a power failure, where the file system can."""
    with contextlib.suppress(OSError):
        _flush(folder)


def _sync_all(path: Path) -> None:
    if path.is_symlink():
        return
    if path.is_file():
        _flush(path)
        return
    for folder, _, files in os.walk(path):
        for name in files:
            if not Path(folder, name).is_symlink():
                _flush(Path(folder, name))
        sync(Path(folder))


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a named pipe would wait for its writer
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Keep other writers out of a folder; the lock ends with the process, however that ends.

    On a file system without locks, writers are not kept apart: each file is still whole.

    Args:
        wait: for a process that holds it; otherwise raise `BlockingIOError`.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise
        except OSError:
            pass
        yield
    finally:
        os.close(handle)


class Batch:
    """Change files below a folder all or none; the caller holds the lock.

    Attributes:
        root: folder of all files.
        written: files that `commit` has written, in order.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.written: list[Path] = []
        self._changes: dict[str, bytes | None] = {}

    def write(self, path: Path, chunks: Chunks) -> Stamp:
        """Give a file these bytes; files appear in the order of these calls."""
        data = b"".join(chunks)
        self._change(path, data)
        return Stamp.of(data)

    def remove(self, path: Path) -> None:
        """Remove a file, and the folders that this leaves empty, after all others are written."""
        self._change(path, None)

    def _change(self, path: Path, data: bytes | None) -> None:
        name = path.relative_to(self.root).as_posix()
        self._changes.pop(name, None)
        self._changes[name] = data

    def add(self, other: Batch) -> None:
        """Take over all changes of another batch of the same root."""
        for name, data in other._changes.items():
            self._change(self.root / name, data)

    def commit(self) -> None:
        """Make all changes; files that hold their bytes already are not touched.

        Raises:
            OSError: with the path; nothing is changed, or the update is `unfinished`.
        """
        changes = {name: data for name, data in self._changes.items() if not _holds(self.root / name, data)}
        if not changes:
            return
        staging, at = self.root / _LAID, self.root
        rows: list[tuple[str, str | None]] = []
        try:
            remove(staging)
            staging.mkdir()
            for number, name in enumerate(sorted(changes, key=lambda name: changes[name] is None)):
                at, data = self.root / name, changes[name]
                _refuse_blocked(at, self.root)
                if data is not None:
                    _fill(staging / str(number), [data])
                rows.append((name, None if data is None else str(number)))
            at = self.root
            _fill(staging / _LIST, [json.dumps(rows).encode()])
            sync(staging)
            staging.replace(self.root / UPDATE)
        except OSError as error:
            with contextlib.suppress(OSError):
                remove(staging)
            error.filename = str(at)
            raise
        sync(self.root)
        finish(self.root)
        self.written = [self.root / name for name, kept in rows if kept is not None]


def unfinished(root: Path) -> bool:
    """Return True if a killed process, or one that is at work now, has left something for `finish`."""
    return os.path.lexists(root / UPDATE) or os.path.lexists(root / _LAID)


def finish(root: Path) -> None:
    """Move the files of a decided update to their places, and drop what was not decided; the caller holds the lock.

    Raises:
        OSError: with the path; the rest stays for the next call.
    """
    with contextlib.suppress(OSError):  # it hinders nobody
        remove(root / _LAID)
    update = root / UPDATE
    if not update.is_dir():
        return
    rows = _listed(root)
    for name, kept in rows:
        target = root / name
        try:
            _finish_one(target, None if kept is None else update / kept)
        except OSError as error:
            error.filename = str(target)
            raise
    for folder in sorted({folder for name, _ in rows for folder in _folders(root, name)}, reverse=True):
        _remove_empty(folder, root)
        sync(folder)
    update.replace(root / _LAID)  # done, by one rename too
    sync(root)
    remove(root / _LAID)


def _listed(root: Path) -> list[tuple[str, str | None]]:
    """Return the changes of a decided update; raises `OSError` for one that `commit` did not write."""
    path = root / UPDATE / _LIST
    try:
        rows = [(str(name), kept) for name, kept in json.loads(path.read_bytes())]
        if all(_inside(root, name) and (kept is None or kept.isdecimal()) for name, kept in rows):
            return rows
    except (ValueError, TypeError, AttributeError):
        pass
    raise OSError(errno.EINVAL, "it is not a list of an update", str(path))


def _inside(root: Path, name: str) -> bool:
    path = root / name
    return ".." not in path.relative_to(root).parts and path.parent.resolve().is_relative_to(root.resolve())


def _finish_one(target: Path, new: Path | None) -> None:
    if new is None:
        target.unlink(missing_ok=True)
    elif new.exists():  # otherwise it was moved before the kill
        target.parent.mkdir(parents=True, exist_ok=True)
        _copy_mode(target, new)
        new.replace(target)


def _copy_mode(old: Path, new: Path) -> None:
    if old.is_file() and not old.is_symlink():
        shutil.copymode(old, new)


def _folders(root: Path, name: str) -> Iterator[Path]:
    folder = (root / name).parent
    while folder != root:
        yield folder
        folder = folder.parent
    yield root


def _remove_empty(folder: Path, root: Path) -> None:
    if folder != root:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _holds(path: Path, data: bytes | None) -> bool:
    """Return True if a file has this content already, or is not there as it should be."""
    if data is None:
        return not os.path.lexists(path)
    with contextlib.suppress(OSError):
        return not path.is_symlink() and path.stat().st_size == len(data) and path.read_bytes() == data
    return False


def _refuse_blocked(target: Path, root: Path) -> None:
    """Raise `OSError` where a file could not be put: `finish` must not fail once an update is decided."""
    parent = next(path for path in target.parents if os.path.lexists(path))
    for problem, code in (
        (not _inside(root, target.relative_to(root).as_posix()), errno.EXDEV),
        (target.is_dir() and not target.is_symlink(), errno.EISDIR),
        (not parent.is_dir(), errno.ENOTDIR),
        (not os.access(parent, os.W_OK | os.X_OK), errno.EACCES),
    ):
        if problem:
            raise OSError(code, os.strerror(code), str(target))
