"""The plain content of files that other trainers wrote with ``torch.save`` or as lines of JSON.

A pickle is never executed, and nothing is taken on trust: anything but plain data is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from regress.dump.dump_location import Location, read_bytes
from regress.dump.dump_reader import detect_format
from regress.dump.file_damage import Damage
from regress.dump.formats import pt_format
from regress.dump.numpy_arrays import DTYPES, Array, is_float, to_numpy
from regress.errors import DumpError
from regress.untrusted_files import parse_json

Payload = Mapping[str, Any]

SUFFIXES = (".pt", ".jsonl")


def read_payload(path: Location) -> Payload:
    """Read the one object of a file; bare ``NaN`` and ``Infinity``, which Python writes into JSON, are accepted.

    Raises:
        DumpError: if the file is missing, damaged, or holds code.
    """
    try:
        data = read_bytes(path)
    except OSError as error:
        raise DumpError(f"{path} cannot be read ({error.strerror or error}): check the path") from None
    try:
        return _content(data)
    except Damage as damage:
        raise DumpError(f"{path} cannot be read: {damage}; {damage.remedy}") from None


def _content(data: bytes) -> Payload:
    if not data:
        raise Damage("it is empty")
    found = pt_format.content(data) if pt_format.matches(data) else _last_line(data)
    if not isinstance(found, dict):
        raise Damage(f"it holds a {type(found).__name__}, but a record is a dict")
    return found


def _last_line(data: bytes) -> Any:
    """Return the last object of a file of JSON lines, which holds several if it was opened for appending."""
    lines = [line for line in data.split(b"\n") if line.strip()]
    try:
        return parse_json(lines[-1], finite=False)
    except (ValueError, IndexError, RecursionError) as error:
        raise Damage(f"its last line is not valid JSON ({error})") from None


def is_own(path: Location) -> bool:
    """Return True if a file is a recording of this project, which has a seal."""
    try:
        data = read_bytes(path)
    except OSError:
        return False  # who opens it says why
    format = detect_format(data)
    if format is None:
        return False
    return b"regress-sha256:" in data[-200:] or b'"regress":' in data or format.name == "safetensors"


def tensor(value: Any, name: str) -> Array:
    """Convert a tensor or a list to an array; the dtype of a list is inferred from its values.

    Raises:
        Damage: for anything else, or a ragged list.
    """
    if not isinstance(value, list | int | float | bool):
        return to_numpy(value, name)
    try:
        array = np.array(value)
    except ValueError:
        raise Damage(f"{name} is a ragged list") from None
    if array.dtype.kind not in "fiub":
        raise Damage(f"{name} holds something else than numbers")
    return narrowed(array.astype(np.float64)) if array.dtype.kind == "f" else array


def narrowed(array: Array) -> Array:
    """Return a float64 array in the narrowest dtype that holds all of its values exactly."""
    if not is_float(array.dtype) or not array.size:
        return array
    names = ("bfloat16", "float32") if array.size > 8 else ("float32",)  # few values may be round by chance
    with np.errstate(all="ignore"):
        for name in names:
            cast: Array = array.astype(DTYPES[name])
            if np.array_equal(cast.astype(np.float64), array, equal_nan=True):
                return cast
    return array
