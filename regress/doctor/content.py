"""Content of what lies at a path, whatever it is, and its replacement."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from regress.dump.files import TEMPORARY, sync_folder

ABSENT, LINK, DIRECTORY = "absent", "link", "folder"


def digest(path: Path) -> str:
    """Return a text that is equal for equal content: hash of a file, target of a link, or of all below a folder."""
    if path.is_symlink():
        return f"{LINK} {path.readlink()}"
    if not os.path.lexists(path):
        return ABSENT
    if path.is_dir():
        parts = [f"{part.relative_to(path).as_posix()} {digest(part)}" for part in sorted(path.rglob("*"))]
        return f"{DIRECTORY} {hashlib.sha256(chr(10).join(parts).encode()).hexdigest()}"
    if not path.is_file():
        return f"special {path.stat().st_mode}"
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file, or the link in its place, at once; permissions stay."""
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    mode = None if path.is_symlink() or not path.exists() else path.stat().st_mode
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            temporary.chmod(mode & 0o7777)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
