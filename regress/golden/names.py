"""File names of a case; nothing else in the store builds a path from a name."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from regress.dump.coordinates import Coordinates, parse_stem
from regress.errors import GoldenError

CASE_FILE = "case.yaml"
MANIFEST = "manifest.json"
TRUTH = "truth"
PENDING = ".pending"
PROPOSAL = "proposal.json"
JOURNAL = ".journal"  # of an update that is being written
CHECKS = "checks"  # beside the cases: values that the fixture `regress` stores, file by file

_CASE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", re.ASCII)
_WORD = re.compile(r"[a-z][a-z0-9_]{0,63}", re.ASCII)
PACKED = (
    ".gz"  # end of the name of a truth file that is stored compressed, whose content is that of the plain one
)
_TRUTH_FILE = re.compile(r"[a-z][a-z0-9_]{0,63}\.[0-9a-f]{12}\.safetensors(\.gz)?", re.ASCII)


def check_case_name(name: str) -> str:
    """Return `name`; raises `GoldenError` when no case can have it."""
    if not _CASE.fullmatch(name) or name == CHECKS:
        raise GoldenError(
            f"{name!r} is no name of a golden case: use letters, digits, '_', '-' and '.', and not {CHECKS!r}"
        )
    return name


def is_word(text: object) -> bool:
    """Return True if `text` can name a quantity or a precision."""
    return isinstance(text, str) and _WORD.fullmatch(text) is not None


def parse_where(text: object) -> Coordinates | None:
    """Return the coordinates of an optimizer update, `step_000000` or `step_000000_update1`; None for
    anything else.
    """
    found = parse_stem(text) if isinstance(text, str) else None
    if found is None or found.stem != text or (found.rank, found.micro) != (None, None):
        return None
    return found


def where_order(where: str) -> tuple[int, int]:
    """Return the sort key of an update: the order in which updates are made."""
    found = parse_where(where)
    assert found is not None, where
    return found.step, -1 if found.update is None else found.update


def truth_file(where: str, quantity: str, sha256: str) -> str:
    """Return the path of a truth file within its case; the content decides the name, so no file is ever rewritten."""
    return f"{TRUTH}/{where}/{quantity}.{sha256[:12]}.safetensors"


def plain_name(path: str) -> str:
    """Return the path that a manifest has for a truth file, which may be stored compressed."""
    return path.removesuffix(PACKED) if is_truth_file(path) else path


def is_truth_file(path: str) -> bool:
    """Return True if a path within a case is one that `truth_file` can make."""
    parts = PurePosixPath(path).parts
    return (
        len(parts) == 3
        and parts[0] == TRUTH
        and parse_where(parts[1]) is not None
        and _TRUTH_FILE.fullmatch(parts[2]) is not None
    )


def is_input(path: object) -> bool:
    """Return True if a path within a case can be that of an input: relative, downwards, visible, not one of
    our own files.
    """
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
