"""Update of a case: the requested changes, and the content afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regress.dump.files import Stamp
from regress.dump.jsontext import Json
from regress.errors import GoldenError
from regress.golden import truth as truths
from regress.golden.entries import TruthEntry
from regress.golden.files import stamp_of
from regress.golden.manifest import Manifest, Tolerances, Truth
from regress.golden.names import CASE_FILE, input_files, is_input, is_word, where_order
from regress.golden.tolerance import ToleranceEntry

NewTruth = Mapping[str, Mapping[str, "Mapping[str, Any] | None"] | None]
NewTolerances = Mapping[str, Mapping[str, ToleranceEntry | None]]
Chunks = list[bytes | memoryview]


@dataclass(frozen=True)
class Update:
    """Changes of a case; everything they do not mention stays as recorded.

    Attributes:
        truth: update -> quantity -> tensor name -> values; None instead of any of the last three removes it.
        tolerances: quantity -> precision -> bound; None removes it.
        inputs: paths within the case to hash again; missing ones are dropped. None keeps those recorded; a
            first recording takes all in the folder.
        provenance: see `regress.golden.provenance`.
        replace: `truth` is all of it; what it does not mention is removed.
    """

    provenance: Mapping[str, Json]
    truth: NewTruth = field(default_factory=dict)
    tolerances: NewTolerances = field(default_factory=dict)
    inputs: Iterable[str] | None = None
    replace: bool = False

    def applied(
        self, folder: Path, base: Manifest | None, roots: Sequence[Path]
    ) -> tuple[Manifest, dict[str, Chunks]]:
        """Return the manifest after the changes, and the bytes of the truth files that they make, by path.

        `roots` are the folders in which files of `base` may lie. Raises `GoldenError` naming what is refused.
        """
        inputs = self.inputs
        if inputs is None:
            inputs = input_files(folder) if base is None else ()
        base = base or Manifest()
        truth, files = merge_truth(roots, {} if self.replace else base.truth, self.truth)
        new = Manifest(
            merge_inputs(folder, base.inputs, inputs),
            truth,
            merge_tolerances(base.tolerances, self.tolerances),
            self.provenance,
        )
        return new, {path: files[path] for path in sorted(new.files & files.keys())}


def merge_truth(
    roots: Sequence[Path], recorded: Truth, changes: NewTruth
) -> tuple[dict[str, dict[str, TruthEntry]], dict[str, Chunks]]:
    """Return the entries after the changes, and the bytes of the files they make."""
    merged = {where: dict(row) for where, row in recorded.items()}
    files: dict[str, Chunks] = {}
    for where, row in changes.items():
        if row is None:
            merged.pop(where, None)
            continue
        for quantity, tensors in row.items():
            old = merged.get(where, {}).pop(quantity, None)
            kept = {} if tensors is None else _merge_tensors(roots, old, quantity, tensors)
            if kept:
                entry, chunks = truths.encode(where, quantity, kept)
                merged.setdefault(where, {})[quantity] = entry
                files[entry.file] = chunks
    return {where: merged[where] for where in sorted(merged, key=where_order) if merged[where]}, files


def _merge_tensors(
    roots: Sequence[Path], recorded: TruthEntry | None, quantity: str, changes: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the recorded tensors, read and verified if any of them stays, with the changes made."""
    stays = recorded is not None and recorded.tensors.keys() - changes.keys()
    old = truths.read(roots, recorded, quantity) if recorded is not None and stays else {}
    return {name: values for name, values in (old | dict(changes)).items() if values is not None}


def merge_inputs(folder: Path, recorded: Mapping[str, Stamp], paths: Iterable[str]) -> dict[str, Stamp]:
    """Return the stamps after hashing `paths` anew; raises `GoldenError` if another input is not as recorded."""
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
    for path in changed_inputs(folder, merged):
        raise GoldenError(
            f"{folder / path} is not the file that was recorded, so nothing new belongs to the case: restore it, or "
            "record it as an input of this update"
        )
    return merged


def changed_inputs(folder: Path, inputs: Mapping[str, Stamp]) -> Iterator[str]:
    """Yield the inputs that are missing or not as recorded."""
    for path, stamp in sorted(inputs.items()):
        found: Stamp | None = None
        with contextlib.suppress(GoldenError):
            found = stamp_of(folder / path)
        if found != stamp:
            yield path


def merge_tolerances(recorded: Tolerances, changes: NewTolerances) -> dict[str, dict[str, ToleranceEntry]]:
    """Return the tolerances after the changes; raises `GoldenError` for one without a reason or a number."""
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
