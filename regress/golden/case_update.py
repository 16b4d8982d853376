"""Update of a case: its new truth files and its manifest, all or none of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from regress.dump.canonical_json import Json
from regress.dump.formats import safetensors_format
from regress.dump.numpy_arrays import Array, is_float
from regress.dump.record import Record
from regress.dump.record_types import RECORD_TYPES
from regress.durable_files import TEMPORARY, Batch, Stamp
from regress.errors import DumpError, GoldenError
from regress.golden.case_manifest import Manifest, TensorEntry, ToleranceEntry, TruthEntry, read_manifest
from regress.golden.golden_case import read_truth
from regress.golden.golden_files import (
    CASE_FILE,
    MANIFEST,
    changing,
    input_files,
    is_input,
    is_truth_file,
    is_word,
    parse_where,
    read,
    stamp_of,
    truth_file,
    truth_files,
    where_order,
)

NewTruth = Mapping[str, Mapping[str, "Mapping[str, Any] | None"] | None]
NewTolerances = Mapping[str, Mapping[str, ToleranceEntry | None]]

_TYPES = {record_type.name for record_type in RECORD_TYPES}
_OTHER = "is_loss_debug"  # the record type of values token by token, to which all other quantities belong


def commit(
    folder: Path,
    *,
    truth: NewTruth | None = None,
    tolerances: NewTolerances | None = None,
    inputs: Iterable[str] | None = None,
    inputs_from: Path | None = None,
    provenance: Mapping[str, Json],
    replace: bool = False,
) -> list[Path]:
    """Record changes of a case in one atomic step; what they do not mention stays as recorded.

    The manifest keeps the provenance of the last commit that changed something.

    Args:
        truth: update -> quantity -> tensor name -> values; None instead of any of the last three removes it.
        tolerances: quantity -> precision -> bound; None removes it.
        inputs: paths within the case to hash again; missing ones are dropped. None keeps those recorded; a first
            recording takes all in the folder.
        inputs_from: folder whose inputs become those of the case, in place of its own.
        provenance: see `regress.golden.golden_provenance`.
        replace: `truth` is all of it; what it does not mention is removed.

    Returns:
        The files written: none when nothing changes, and the manifest last otherwise.

    Raises:
        GoldenError: naming what cannot be stored, read or written; the case is then as it was.
    """
    with changing(folder.parent) as batch:
        if not (folder / CASE_FILE).is_file():
            raise GoldenError(
                f"{folder} has no {CASE_FILE}, so it is not a case: write one that says its reason"
            )
        base = read_manifest(folder)
        source = inputs_from or folder
        if inputs is None:
            inputs = input_files(source) if base is None else ()
        old = base or Manifest()
        merged, files = _merge_truth(folder, {} if replace else old.truth, truth or {})
        new = Manifest(
            _merge_inputs(source, old.inputs, inputs),
            merged,
            _merge_tolerances(old.tolerances, tolerances or {}),
            provenance,
        )
        if inputs_from is not None:
            _replace_inputs(batch, folder, inputs_from)
        for name in sorted(new.files & files.keys()):
            batch.write(folder / name, [files[name]])
        if base is None or base.content() != new.content():
            batch.write(folder / MANIFEST, [new.text.encode()])
        sweep(batch, folder, new)
    return batch.written


def _replace_inputs(batch: Batch, folder: Path, source: Path) -> None:
    """Add to a batch that a case gets the inputs of another folder, and no others."""
    files = input_files(source)
    for name in files:
        batch.write(folder / name, [read(source / name)])
    for name in {*input_files(folder)} - {*files}:
        batch.remove(folder / name)


def take_over(batch: Batch, folder: Path, staged: Path, base: bytes) -> None:
    """Add to a batch what makes a case the one in another folder, a changed copy of it.

    Args:
        base: manifest that the copy was made from.

    Raises:
        GoldenError: if the case is no longer the one that was copied, or a file of the copy is damaged.
    """
    new, text = read_manifest(staged), read(staged / MANIFEST)
    assert new is not None
    _merge_inputs(folder, new.inputs, ())
    if read(folder / MANIFEST) not in (base, text):
        raise GoldenError(f"{folder / MANIFEST} was changed by somebody else: run the update again")
    for where, row in new.truth.items():
        for quantity, entry in row.items():
            name = truth_file(where, quantity)
            batch.write(folder / name, [read(staged / name, entry.stamp)])
    batch.write(folder / MANIFEST, [text])
    sweep(batch, folder, new)


def sweep(batch: Batch, folder: Path, manifest: Manifest | None) -> None:
    """Add to a batch the removal of truth files that `manifest` does not name, and of leftovers of killed writers."""
    for path in leftovers(folder, manifest):
        batch.remove(folder / path)


def leftovers(folder: Path, manifest: Manifest | None) -> list[str]:
    """Return the paths within the folder of our own files that belong to no recording: safe to remove."""
    named = set() if manifest is None else manifest.files
    present = [*truth_files(folder), *(path.name for path in folder.glob(f"{TEMPORARY}*.json"))]
    return sorted(
        path
        for path in present
        if Path(path).name.startswith(TEMPORARY) or (is_truth_file(path) and path not in named)
    )


def encode(where: str, quantity: str, tensors: Mapping[str, Any]) -> tuple[TruthEntry, bytes]:
    """Return the entry of a truth file and its bytes, which depend on nothing but the values.

    Raises `GoldenError` for names that no file can have, no tensor at all, or a value that is not finite.
    """
    place = parse_where(where)
    if place is None:
        raise GoldenError(f"{where!r} is not an optimizer update: write step_000000 or step_000000_update1")
    if not is_word(quantity):
        raise GoldenError(f"{quantity!r} is not a name of a quantity: use lower-case letters, digits and '_'")
    if not tensors:
        raise GoldenError(f"{where}/{quantity} has no tensors, so nothing could ever fail: leave it out")
    record_type = quantity if quantity in _TYPES else _OTHER
    try:
        record = Record.of(
            record_type, place, {name: tensors[name] for name in sorted(tensors)}, {"quantity": quantity}
        )
    except DumpError as error:
        raise GoldenError(f"{where}/{quantity} cannot be stored: {error}") from None
    for name, array in record.tensors.items():
        check_finite(array, f"{where}/{quantity}: {name}")
    data = b"".join(safetensors_format.encode(record))
    entries = {name: TensorEntry.of(array) for name, array in record.tensors.items()}
    return TruthEntry(Stamp.of(data), entries), data


def check_finite(array: Array, name: str) -> None:
    """Raise `GoldenError` naming the first NaN or infinity: a golden that holds one can hide anything."""
    if not is_float(array.dtype):
        return
    bad = ~np.isfinite(array.astype(np.float64))
    if bad.any():
        index = [int(i) for i in np.unravel_index(int(bad.argmax()), array.shape)]
        raise GoldenError(f"""{name} is {float(array[tuple(index)])} at {index} ({int(bad.sum())} of {array.size}
        elements are not finite), which no golden may be: find what produced it""")


def _merge_truth(
    folder: Path, recorded: Mapping[str, Mapping[str, TruthEntry]], changes: NewTruth
) -> tuple[dict[str, dict[str, TruthEntry]], dict[str, bytes]]:
    """Return the entries after the changes, and the bytes of the files they make."""
    merged = {where: dict(row) for where, row in recorded.items()}
    files: dict[str, bytes] = {}
    for where, row in changes.items():
        if row is None:
            merged.pop(where, None)
            continue
        for quantity, tensors in row.items():
            old = merged.get(where, {}).pop(quantity, None)
            kept = {} if tensors is None else _merge_tensors(folder, where, quantity, old, tensors)
            if kept:
                entry, files[truth_file(where, quantity)] = encode(where, quantity, kept)
                merged.setdefault(where, {})[quantity] = entry
    return {where: merged[where] for where in sorted(merged, key=where_order) if merged[where]}, files


def _merge_tensors(
    folder: Path, where: str, quantity: str, recorded: TruthEntry | None, changes: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the recorded tensors, read and verified if any of them stays, with the changes made."""
    stays = recorded is not None and recorded.tensors.keys() - changes.keys()
    old = read_truth(folder, where, quantity, recorded) if recorded is not None and stays else {}
    return {name: values for name, values in (old | dict(changes)).items() if values is not None}


def _merge_inputs(folder: Path, recorded: Mapping[str, Stamp], paths: Iterable[str]) -> dict[str, Stamp]:
    """Return the stamps after hashing `paths` anew; raises `GoldenError` if another input is not as recorded."""
    merged = dict(recorded)
    for path in paths:
        if not is_input(path):
            raise GoldenError(
                f"{path!r} is not an input: give its path within {folder}, such as model/config.json"
            )
        if (folder / path).exists():
            merged[path] = stamp_of(folder / path)
        elif path in merged:
            del merged[path]
        else:
            raise GoldenError(f"{folder / path} does not exist, so it cannot be recorded: check the path")
    if CASE_FILE not in merged:
        merged[CASE_FILE] = stamp_of(folder / CASE_FILE)
    for path in _changed_inputs(folder, merged):
        raise GoldenError(f"""{folder / path} is not the file that was recorded, so nothing new belongs to the case:
        restore it, or record it as an input of this update""")
    return merged


def _changed_inputs(folder: Path, inputs: Mapping[str, Stamp]) -> Iterator[str]:
    for path, stamp in sorted(inputs.items()):
        try:
            same = stamp_of(folder / path, stamp.size) == stamp
        except GoldenError:
            same = False
        if not same:
            yield path


def _merge_tolerances(
    recorded: Mapping[str, Mapping[str, ToleranceEntry]], changes: NewTolerances
) -> dict[str, dict[str, ToleranceEntry]]:
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
