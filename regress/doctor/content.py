"""Content of what lies at a path, whatever it is."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

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
