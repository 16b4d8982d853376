"""Truth files: the values of one quantity at one update, as a record with its own checksum."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from regress.dump.arrays import Array, dtype_name, is_float
from regress.dump.damage import Damage
from regress.dump.files import Stamp
from regress.dump.formats import safetensors
from regress.dump.record import Record
from regress.dump.stages import STAGES
from regress.errors import DumpError, GoldenError
from regress.golden.entries import TensorEntry, TruthEntry
from regress.golden.files import RESTORE
from regress.golden.names import is_word, parse_where, truth_file
from regress.golden.packed import read_stored

_STAGES = {stage.name for stage in STAGES}
_OTHER = "is_loss_debug"  # the stage of values token by token, to which all other quantities belong


def encode(
    where: str, quantity: str, tensors: Mapping[str, Any]
) -> tuple[TruthEntry, list[bytes | memoryview]]:
    """Return the entry of a truth file and its bytes, which depend on nothing but the values.

    Raises `GoldenError` for names that no file can have, no tensor at all, or a value that is not finite.
    """
    place = parse_where(where)
    if place is None:
        raise GoldenError(f"{where!r} is no optimizer update: write step_000000 or step_000000_update1")
    if not is_word(quantity):
        raise GoldenError(f"{quantity!r} is no name of a quantity: use lower-case letters, digits and '_'")
    if not tensors:
        raise GoldenError(f"{where}/{quantity} has no tensors, so nothing could ever fail: leave it out")
    stage = quantity if quantity in _STAGES else _OTHER
    ordered = {name: tensors[name] for name in sorted(tensors)}
    try:
        record = Record.of(stage, place, ordered, {"quantity": quantity})
    except DumpError as error:
        raise GoldenError(f"{where}/{quantity} cannot be stored: {error}") from None
    for name, array in record.tensors.items():
        check_finite(array, f"{where}/{quantity}: {name}")
    chunks = safetensors.encode(record)
    stamp = _stamp(chunks)
    entries = {name: TensorEntry.of(array) for name, array in record.tensors.items()}
    return TruthEntry(truth_file(where, quantity, stamp.sha256), stamp, entries), chunks


def _stamp(chunks: list[bytes | memoryview]) -> Stamp:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return Stamp(sum(map(len, chunks)), digest.hexdigest())


def check_finite(array: Array, name: str) -> None:
    """Raise `GoldenError` naming the first NaN or infinity: a golden that holds one can hide anything."""
    if not is_float(array.dtype):
        return
    bad = ~np.isfinite(array.astype(np.float64))
    if bad.any():
        index = [int(i) for i in np.unravel_index(int(bad.argmax()), array.shape)]
        raise GoldenError(
            f"{name} is {float(array[tuple(index)])} at {index} ({int(bad.sum())} of {array.size} elements are not "
            "finite), which no golden may be: find what produced it"
        )


def read(roots: Sequence[Path], entry: TruthEntry, quantity: str) -> dict[str, Array]:
    """Return the tensors of a truth file, every byte verified; raises `GoldenError` naming the file.

    `roots` are the folders it may lie in; the first that has it is used.
    """
    path, data = read_stored(roots, entry.file, entry.stamp)
    try:
        (record,) = safetensors.decode(data)
    except (Damage, DumpError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise GoldenError(f"{path} is no intact record ({error}): {RESTORE}") from None
    if record.meta.get("quantity") != quantity or record.where.stem != path.parent.name:
        raise GoldenError(f"{path} holds {record.where.stem}/{record.meta.get('quantity')}: {RESTORE}")
    found = {
        name: (dtype_name(a.dtype), "x".join(map(str, a.shape)) or "scalar")
        for name, a in record.tensors.items()
    }
    if found != {name: (row.dtype, row.shape) for name, row in entry.tensors.items()}:
        raise GoldenError(f"{path} holds other tensors than its manifest says: {RESTORE}")
    return record.tensors
