"""Changing a case: new files first, then the manifest in one rename, then the files nobody names any more.

A process killed at any moment leaves the case as it was or as it will be; what else it leaves are files that no
manifest names, which the next commit removes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regress.dump.files import TEMPORARY, Stamp, sync_folder
from regress.dump.jsontext import Json
from regress.errors import GoldenError
from regress.golden import truth as truths
from regress.golden.entries import TruthEntry
from regress.golden.files import locked, remove, stamp_of, write
from regress.golden.manifest import Manifest, read_manifest
from regress.golden.names import (
    CASE_FILE,
    MANIFEST,
    TRUTH,
    input_files,
    is_input,
    is_truth_file,
    is_word,
    truth_files,
    where_order,
)
from regress.golden.tolerance import ToleranceEntry

NewTruth = Mapping[str, Mapping[str, "Mapping[str, Any] | None"] | None]
NewTolerances = Mapping[str, Mapping[str, ToleranceEntry | None]]
Chunks = list[bytes | memoryview]


@dataclass(frozen=True)
class Change:
    """What a commit would do to a case; nothing is written yet.

    Attributes:
        old, new: the manifest before and after; `old` is None for a case that was not recorded.
        files: path within the case -> bytes of each truth file that `new` names and `old` does not.
    """

    old: Manifest | None
    new: Manifest
    files: Mapping[str, Chunks]

    @property
    def empty(self) -> bool:
        """Whether nothing changes; another provenance alone is no change."""
        return self.old is not None and self.old.content() == self.new.content()


def commit(
    folder: Path,
    *,
    truth: NewTruth | None = None,
    tolerances: NewTolerances | None = None,
    inputs: Iterable[str] | None = None,
    provenance: Mapping[str, Json],
    replace: bool = False,
) -> list[Path]:
    """Record changes of a case in one atomic step.

    Args:
        truth: update -> quantity -> tensor name -> values. What is not mentioned stays as recorded; None instead of
            values, tensors or quantities removes them.
        tolerances: quantity -> precision -> bound, merged in the same way.
        inputs: paths within the case that are hashed anew; one that is gone is forgotten. Not given: those recorded
            stay, and the first commit takes all that lie in the folder.
        provenance: see `regress.golden.provenance`; kept only where something else changes.
        replace: `truth` is all of it; what it does not mention is removed.

    Returns:
        The files written: none when nothing changes, and the manifest last otherwise.

    Raises:
        GoldenError: naming what cannot be stored, read or written; the case is then as it was.
    """
    with locked(folder):
        change = prepare(
            folder, truth=truth, tolerances=tolerances, inputs=inputs, provenance=provenance, replace=replace
        )
        return apply(folder, change)


def prepare(
    folder: Path,
    *,
    truth: NewTruth | None = None,
    tolerances: NewTolerances | None = None,
    inputs: Iterable[str] | None = None,
    provenance: Mapping[str, Json],
    replace: bool = False,
) -> Change:
    """What `commit` would do, without doing it."""
    if not (folder / CASE_FILE).is_file():
        raise GoldenError(f"{folder} has no {CASE_FILE}, so it is no case: write one that says its reason")
    old = read_manifest(folder)
    base = old or Manifest()
    if inputs is None and old is None:
        inputs = input_files(folder)
    recorded = {} if replace else base.truth
    entries, files = _merge_truth(folder, recorded, truth or {})
    new = Manifest(
        _merge_inputs(folder, base.inputs, inputs or ()),
        entries,
        _merge_tolerances(base.tolerances, tolerances or {}),
        provenance,
    )
    new.text  # noqa: B018 - whatever JSON cannot hold is refused here, before anything is written
    return Change(old, new, {path: files[path] for path in new.files & files.keys()})


def apply(folder: Path, change: Change) -> list[Path]:
    """Carry out a change; whoever calls holds the lock of the folder."""
    written: list[Path] = []
    if not change.empty:
        for path, chunks in sorted(change.files.items()):
            written += _write_truth(folder / path, chunks)
        for parent in sorted({path.parent for path in written}):
            sync_folder(parent)
        sync_folder(folder / TRUTH)
        write(folder / MANIFEST, [change.new.text.encode()])
        sync_folder(folder)
        written.append(folder / MANIFEST)
    sweep(folder, change.new)
    return written


def _write_truth(path: Path, chunks: Chunks) -> list[Path]:
    """Write a file unless it lies there already, whole: its name is its content."""
    data = b"".join(chunks)
    with contextlib.suppress(OSError):
        if path.read_bytes() == data:
            return []
    write(path, [data])
    return [path]


def sweep(folder: Path, manifest: Manifest) -> list[Path]:
    """Remove truth files that `manifest` does not name and what killed writers left; returns their paths."""
    gone = [folder / path for path in leftovers(folder, manifest)]
    for path in gone:
        remove(path)
    for parent in {path.parent for path in gone} - {folder}:
        with contextlib.suppress(OSError):  # it holds other files
            parent.rmdir()
    return gone


def leftovers(folder: Path, manifest: Manifest | None) -> list[str]:
    """Paths within the case of our own files that belong to no recording: safe to remove."""
    named = set() if manifest is None else manifest.files
    dead = [path for path in truth_files(folder) if is_truth_file(path) and path not in named]
    dead += [path for path in truth_files(folder) if Path(path).name.startswith(TEMPORARY)]
    return sorted(dead + [path.name for path in folder.glob(f"{TEMPORARY}*-{MANIFEST}")])


def _merge_truth(
    folder: Path, recorded: Mapping[str, Mapping[str, TruthEntry]], changes: NewTruth
) -> tuple[dict[str, dict[str, TruthEntry]], dict[str, Chunks]]:
    merged = {where: dict(row) for where, row in recorded.items()}
    files: dict[str, Chunks] = {}
    for where, row in changes.items():
        if row is None:
            merged.pop(where, None)
            continue
        for quantity, tensors in row.items():
            entry = None
            if tensors is not None:
                all_tensors = _merge_tensors(folder, merged.get(where, {}).get(quantity), quantity, tensors)
                entry, chunks = truths.encode(where, quantity, all_tensors) if all_tensors else (None, [])
            if entry is None:
                merged.get(where, {}).pop(quantity, None)
            else:
                merged.setdefault(where, {})[quantity] = entry
                files[entry.file] = chunks
    return {where: merged[where] for where in sorted(merged, key=where_order) if merged[where]}, files


def _merge_tensors(
    folder: Path, recorded: TruthEntry | None, quantity: str, changes: Mapping[str, Any]
) -> dict[str, Any]:
    """The recorded tensors, read and verified if any of them stays, with the changes made."""
    stays = recorded is not None and recorded.tensors.keys() - changes.keys()
    old = truths.read(folder, recorded, quantity) if recorded is not None and stays else {}
    return {name: values for name, values in (old | dict(changes)).items() if values is not None}


def _merge_inputs(folder: Path, recorded: Mapping[str, Stamp], paths: Iterable[str]) -> dict[str, Stamp]:
    merged = dict(recorded)
    for path in paths:
        if not is_input(path):
            raise GoldenError(
                f"{path!r} is no input: give its path within {folder}, such as model/config.json"
            )
        if (folder / path).exists():
            merged[path] = stamp_of(folder / path)
        elif path in merged:
            del merged[path]
        else:
            raise GoldenError(f"{folder / path} does not exist, so it cannot be recorded: check the path")
    if CASE_FILE not in merged:
        merged[CASE_FILE] = stamp_of(folder / CASE_FILE)
    return merged


def _merge_tolerances(
    recorded: Mapping[str, Mapping[str, ToleranceEntry]], changes: NewTolerances
) -> dict[str, dict[str, ToleranceEntry]]:
    merged = {quantity: dict(row) for quantity, row in recorded.items()}
    for quantity, row in changes.items():
        for precision, entry in row.items():
            if not is_word(quantity) or not is_word(precision):
                raise GoldenError(
                    f"{quantity}/{precision} cannot name a tolerance: use lower-case letters, digits and '_'"
                )
            if entry is None:
                merged.get(quantity, {}).pop(precision, None)
                continue
            if (problem := entry.problem()) is not None:
                raise GoldenError(f"the tolerance of {quantity} at {precision} {problem}")
            merged.setdefault(quantity, {})[precision] = entry
    return {quantity: row for quantity, row in merged.items() if row}
