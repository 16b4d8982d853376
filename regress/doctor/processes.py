"""Processes on this machine that are writing below a folder, as far as the operating system shows them (Linux)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_WRITES = os.O_WRONLY | os.O_RDWR


def writer_of(path: Path) -> int | None:
    """Return the number of another process that has a file open for writing: this one, or one below this folder.

    None where there is none, or where the operating system does not tell.
    """
    start = f"{path}{os.sep}"
    for process, handle, target in _handles():
        if (target == str(path) or target.startswith(start)) and _writes(process, handle):
            return process
    return None


def _handles() -> Iterator[tuple[int, str, str]]:
    own = os.getpid()
    for folder in _PROC.glob("[0-9]*"):
        process = int(folder.name)
        if process == own:
            continue
        try:
            handles = [*(folder / "fd").iterdir()]
        except OSError:
            continue  # gone, or another user's
        for handle in handles:
            try:
                yield process, handle.name, str(handle.readlink())
            except OSError:
                continue


def _writes(process: int, handle: str) -> bool:
    try:
        lines = (_PROC / str(process) / "fdinfo" / handle).read_text().splitlines()
    except OSError:
        return False
    flags = next((line.split()[1] for line in lines if line.startswith("flags:")), "0")
    return bool(int(flags, 8) & _WRITES)
