"""Changes of a case: new files first, then the manifest, then the removal of unnamed files; all or none.

A process killed at any moment leaves the case as it was or as it will be, once the case is opened again; see
`journal`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from regress.dump.files import TEMPORARY
from regress.dump.jsontext import Json
from regress.errors import GoldenError
from regress.golden.manifest import Manifest, read_manifest
from regress.golden.names import (
    CASE_FILE,
    MANIFEST,
    PACKED,
    input_files,
    is_truth_file,
    plain_name,
    truth_files,
)
from regress.golden.packed import read_plain, stored_as
from regress.golden.transaction import Changes, transaction
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
    with transaction(folder.parent) as changes:
        plan_commit(changes, folder, Update(provenance, truth or {}, tolerances or {}, inputs, replace))
        return changes.paths()


def plan_commit(changes: Changes, folder: Path, update: Update, *, inputs: Path | None = None) -> None:
    """Add an update of a case to a transaction; raises `GoldenError` naming what is refused.

    Args:
        inputs: folder whose inputs become those of the case; None: it keeps its own.
    """
    check_case(folder)
    old = read_manifest(folder)
    new, files = update.applied(inputs or folder, old, [folder])
    if inputs is not None:
        _plan_inputs(changes, folder, inputs)
    plan_case(changes, folder, old, new, files)


def _plan_inputs(changes: Changes, folder: Path, source: Path) -> None:
    """Add to a transaction that a case gets the inputs of another folder, and no others."""
    wanted = input_files(source)
    for name in wanted:
        data = (source / name).read_bytes()
        if not (folder / name).is_file() or (folder / name).read_bytes() != data:
            changes.write(folder / name, [data])
    for name in {*input_files(folder)} - {*wanted}:
        changes.remove(folder / name)


def check_case(folder: Path) -> None:
    """Raise `GoldenError` unless the folder is that of a case."""
    if not (folder / CASE_FILE).is_file():
        raise GoldenError(f"{folder} has no {CASE_FILE}, so it is no case: write one that says its reason")


def plan_case(
    changes: Changes, folder: Path, old: Manifest | None, new: Manifest, files: Mapping[str, Chunks]
) -> None:
    """Add to a transaction the changes that turn one manifest of a case into the other.

    `files` are the truth files of `new` by path; those that lie there already, whole, are not touched.
    """
    plan_truth(changes, folder, files)
    if old is None or old.content() != new.content():
        changes.write(folder / MANIFEST, [new.text.encode()])
    plan_sweep(changes, folder, new)


def plan_truth(changes: Changes, folder: Path, files: Mapping[str, Chunks]) -> None:
    """Add truth files to a transaction, unless they are already present and whole."""
    for name, chunks in files.items():
        data = b"".join(chunks)
        forms = [name, name + PACKED]
        kept = next((form for form in forms if _holds(folder / form, data)), None)
        if kept is None:
            kept, stored = stored_as(name, data)
            changes.write(folder / kept, [stored])
        for form in forms:  # one that is damaged must not be read
            if form != kept:
                changes.remove(folder / form)


def _holds(path: Path, data: bytes) -> bool:
    with contextlib.suppress(OSError, GoldenError):
        return read_plain(path, len(data)) == data
    return False


def plan_sweep(changes: Changes, folder: Path, manifest: Manifest | None) -> None:
    """Add to a transaction the removal of truth files that `manifest` does not name, and of leftovers of
    killed writers.
    """
    for path in leftovers(folder, manifest):
        changes.remove(folder / path)


def leftovers(folder: Path, manifest: Manifest | None) -> list[str]:
    """Return the paths within the folder of our own files that belong to no recording: safe to remove."""
    named = set() if manifest is None else manifest.files
    present = truth_files(folder)
    dead = [path for path in present if is_truth_file(path) and plain_name(path) not in named]
    dead += [path for path in present if Path(path).name.startswith(TEMPORARY)]
    return sorted(dead + [path.name for path in folder.glob(f"{TEMPORARY}*.json")])
