"""Changing a case: new files first, then the manifest in one rename, then the files nobody names any more.

A process killed at any moment leaves the case as it was or as it will be; what else it leaves are files that no
manifest names, which the next commit removes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from regress.dump.files import TEMPORARY, sync_folder
from regress.dump.jsontext import Json
from regress.errors import GoldenError
from regress.golden.files import locked, remove, write
from regress.golden.manifest import Manifest, read_manifest
from regress.golden.names import CASE_FILE, MANIFEST, TRUTH, is_truth_file, truth_files
from regress.golden.update import Chunks, NewTolerances, NewTruth, Update


def commit(
    folder: Path,
    *,
    truth: NewTruth | None = None,
    tolerances: NewTolerances | None = None,
    inputs: Iterable[str] | None = None,
    provenance: Mapping[str, Json],
    replace: bool = False,
) -> list[Path]:
    """Record changes of a case in one atomic step; the arguments are those of `Update`.

    The manifest keeps the provenance of the last commit that changed something.

    Returns:
        The files written: none when nothing changes, and the manifest last otherwise.

    Raises:
        GoldenError: naming what cannot be stored, read or written; the case is then as it was.
    """
    update = Update(provenance, truth or {}, tolerances or {}, inputs, replace)
    with locked(folder):
        check_case(folder)
        old = read_manifest(folder)
        new, files = update.applied(folder, old, [folder])
        return write_case(folder, old, new, files)


def check_case(folder: Path) -> None:
    """Raise `GoldenError` unless the folder is that of a case."""
    if not (folder / CASE_FILE).is_file():
        raise GoldenError(f"{folder} has no {CASE_FILE}, so it is no case: write one that says its reason")


def write_case(folder: Path, old: Manifest | None, new: Manifest, files: Mapping[str, Chunks]) -> list[Path]:
    """Bring a case from one manifest to the other; whoever calls holds the lock of the folder.

    `files` are the truth files of `new` by path; those that lie there already, whole, are not touched.
    """
    changed = old is None or old.content() != new.content()
    text = new.text if changed else ""  # what JSON cannot hold is refused before anything is written
    written = write_truth(folder, files)
    if changed:
        write(folder / MANIFEST, [text.encode()])
        sync_folder(folder)
        written.append(folder / MANIFEST)
    sweep(folder, new)
    return written


def write_truth(folder: Path, files: Mapping[str, Chunks]) -> list[Path]:
    """Write truth files, safe on disk when this returns; returns the paths of those that were not there, whole."""
    written = []
    for name, chunks in files.items():
        path, data = folder / name, b"".join(chunks)
        if _holds(path, data):
            continue
        write(path, [data])
        written.append(path)
    for parent in sorted({path.parent for path in written}):
        sync_folder(parent)
    if written:
        sync_folder(folder / TRUTH)
        sync_folder(folder)
    return written


def _holds(path: Path, data: bytes) -> bool:
    with contextlib.suppress(OSError):
        return path.read_bytes() == data
    return False


def sweep(folder: Path, manifest: Manifest | None) -> list[Path]:
    """Remove truth files that `manifest` does not name and what killed writers left; returns their paths."""
    gone = [folder / path for path in leftovers(folder, manifest)]
    for path in gone:
        remove(path)
    for parent in {path.parent for path in gone} - {folder}:
        with contextlib.suppress(OSError):  # it holds other files
            parent.rmdir()
    return gone


def leftovers(folder: Path, manifest: Manifest | None) -> list[str]:
    """Paths within the folder of our own files that belong to no recording: safe to remove."""
    named = set() if manifest is None else manifest.files
    present = truth_files(folder)
    dead = [path for path in present if is_truth_file(path) and path not in named]
    dead += [path for path in present if Path(path).name.startswith(TEMPORARY)]
    return sorted(dead + [path.name for path in folder.glob(f"{TEMPORARY}*.json")])
