"""Files of a golden directory: their names, and their content with every byte verified.

::

    golden/<case>/case.yaml, model/, trajectories/ ...       inputs
    golden/<case>/truth/step_000000/loss.safetensors         values
    golden/<case>/manifest.json                              hashes and numbers of all of them
    golden/checks/<module>/<test>-<name>.<hash>.safetensors  values of the fixture `regress`

Files keep their names, so ``git commit -a`` takes an update and ``git restore`` takes it back.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from regress.dump.coordinates import Coordinates, parse_stem
from regress.dump.dump_files import file_stamp, remedy
from regress.durable_files import UPDATE, Batch, Stamp, finish, locked, unfinished
from regress.errors import DumpError, GoldenError
from regress.untrusted_files import read_bytes

CASE_FILE, MANIFEST, TRUTH = "case.yaml", "manifest.json", "truth"
CHECKS = "checks"  # beside the cases
RESTORE = "restore it from version control, or record the case again with regress golden record"

_PLACE = "folder"
_CASE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", re.ASCII)
_WORD = re.compile(r"[a-z][a-z0-9_]{0,63}", re.ASCII)


def check_case_name(name: str) -> str:
    """Return `name`; raises `GoldenError` when no case can have it."""
    if not _CASE.fullmatch(name) or name == CHECKS:
        raise GoldenError(
            f"{name!r} is not a name of a golden case: use letters, digits, '_', '-' and '.', and not {CHECKS!r}"
        )
    return name


def is_word(text: object) -> bool:
    """Return True if `text` can name a quantity or a precision."""
    return isinstance(text, str) and _WORD.fullmatch(text) is not None


def parse_where(text: object) -> Coordinates | None:
    """Return the place of an optimizer update, `step_000000` or `step_000000_update1`; None for anything else."""
    found = parse_stem(text) if isinstance(text, str) else None
    if found is None or found.stem != text or (found.rank, found.micro) != (None, None):
        return None
    return found


def where_order(where: str) -> tuple[int, int]:
    """Return the sort key of an update: the order in which updates are made."""
    found = parse_where(where)
    assert found is not None, where
    return found.step, -1 if found.update is None else found.update


def truth_file(where: str, quantity: str) -> str:
    """Return the path of a truth file within its case."""
    return f"{TRUTH}/{where}/{quantity}.safetensors"


def is_truth_file(path: str) -> bool:
    """Return True if a path within a case is one that `truth_file` can make."""
    pure = PurePosixPath(path)
    return (
        path == truth_file(pure.parent.name, pure.stem)
        and is_word(pure.stem)
        and bool(parse_where(pure.parent.name))
    )


def is_input(path: object) -> bool:
    """Return True if a path within a case can be that of an input: downwards, visible, not one of our own files."""
    if not isinstance(path, str) or not path or "\\" in path or not path.isprintable():
        return False
    pure = PurePosixPath(path)
    if pure.is_absolute() or str(pure) != path or any(part.startswith(".") for part in pure.parts):
        return False
    return pure.parts[0] != TRUTH and path != MANIFEST


def input_files(folder: Path) -> list[str]:
    """Return all inputs in the folder of a case, by their path within it; hidden files are not inputs."""
    found = []
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        base = Path(root).relative_to(folder)
        found += [path for name in files if is_input(path := (base / name).as_posix())]
    return sorted(found)


def truth_files(folder: Path) -> list[str]:
    """Return all files under `truth/`, ours or not, by their path within the case."""
    found = (path for path in (folder / TRUTH).rglob("*") if not path.is_dir())
    return sorted(path.relative_to(folder).as_posix() for path in found)


def read(path: Path, stamp: Stamp | None = None) -> bytes:
    """Return the bytes of a file; raises `GoldenError` naming it when it cannot be read or is not what it should be.

    Args:
        stamp: what was recorded of it; None: nothing was.
    """
    try:
        size = path.stat().st_size  # before reading: a replaced file may be huge
        if stamp is not None and size != stamp.size:
            raise GoldenError(
                converted(path, stamp)
                or f"{path} has {size} bytes, but {stamp.size} were recorded: {RESTORE}"
            )
        data = read_bytes(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    if stamp is not None and Stamp.of(data) != stamp:
        raise GoldenError(f"{path} does not match its recorded hash, so it is damaged or changed: {RESTORE}")
    return data


def converted(path: Path, stamp: Stamp) -> str | None:
    """Return the sentence for a file that is what was recorded but for its line endings; None for any other."""
    if not stamp.size < path.stat().st_size <= 2 * stamp.size:
        return None
    if Stamp.of(read_bytes(path).replace(b"\r\n", b"\n")) != stamp:
        return None
    return (
        f"{path} has other line endings than it was recorded with, as git makes them where core.autocrlf is set: add "
        "the line '* -text' to .gitattributes of the golden directory, remove the case, and check it out again"
    )


def stamp_of(path: Path, size: int | None = None) -> Stamp:
    """Return size and hash of a file as it is; raises `GoldenError` when it cannot be read.

    Args:
        size: size that it should have; a file of another size, which may be huge, is not read, and gets no hash.
    """
    try:
        return file_stamp(path, size)
    except DumpError as error:
        raise _unreadable(path, error.__cause__) from error


def _unreadable(path: Path, error: BaseException | None) -> GoldenError:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return GoldenError(f"{path} is missing: {RESTORE}")
    return GoldenError(f"{path} cannot be read ({getattr(error, 'strerror', error)}): check its permissions")


@contextlib.contextmanager
def changing(root: Path) -> Iterator[Batch]:
    """Change files below a golden directory, all or none; an exception within the `with` changes nothing."""
    if not root.is_dir():
        raise GoldenError(f"{root} is not a folder that can be read: check the path")
    try:
        with locked(root):
            finish(root)
            batch = Batch(root)
            yield batch
            batch.commit()
    except OSError as error:
        path = Path(error.filename or root)
        if not os.path.lexists(root / UPDATE):
            raise unwritable(path, error) from error
        raise GoldenError(f"""{path} cannot be written ({error.strerror}) in the middle of an update, which the next
        command that opens {root} finishes: {remedy(error, _PLACE)}""") from error


def finish_update(root: Path) -> None:
    """Finish the update of a process that was killed in the middle of it; one that was not decided is nothing."""
    if not unfinished(root):
        return
    decided = os.path.lexists(root / UPDATE)
    try:
        with locked(root, wait=decided):
            finish(root)
    except OSError as error:
        if (
            not decided
        ):  # somebody prepares an update now, or a leftover cannot be removed: neither hinders a reader
            return
        raise GoldenError(f"""{root / UPDATE} is an update that was interrupted, and cannot be finished, because
        {error.filename} cannot be written ({error.strerror}): {remedy(error, _PLACE)}""") from error


def unwritable(path: Path, error: OSError) -> GoldenError:
    """Return the error for a path that cannot be written or removed; it states that the golden is unchanged."""
    cause = error.strerror or "unknown reason"
    return GoldenError(
        f"{path} cannot be written ({cause}), so the golden is as it was before: {remedy(error, _PLACE)}"
    )
