"""Tensors of one file of weights, read in place: headers are parsed, values stay in the mapped file.

Nothing is executed, and headers that contradict the size of the file are refused. Source of the format of safetensors:
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import math
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from regress.dump.dump_location import Location
from regress.dump.file_damage import Damage
from regress.dump.formats import torch_archive
from regress.dump.formats.safetensors_format import CODES, HEADER
from regress.dump.mapped_arrays import map_file
from regress.dump.numpy_arrays import DTYPES, Array
from regress.errors import DumpError
from regress.untrusted_files import TwiceError, parse_json

SUFFIXES = (".safetensors", ".pt", ".bin", ".pth")

_DTYPES = {code: name for name, code in CODES.items()}


def tensors_in(path: Location) -> dict[str, Array]:
    """Return the tensors of a file by name, in their order there; they are views of the mapped file.

    Raises:
        DumpError: if it cannot be read, is damaged, holds something else, or claims what it does not hold.
    """
    if isinstance(path, Path):
        data = map_file(path).data
    else:
        try:
            data = memoryview(path.read_bytes())
        except FileNotFoundError:
            raise DumpError(f"{path} does not exist: check the path") from None
    try:
        found = _tensors(data, path)
    except Damage as damage:
        raise DumpError(f"{path} cannot be read as tensors: {damage}; {damage.remedy}") from None
    if not found:
        raise DumpError(
            f"{path} holds no tensor, so there is nothing to compare: give the file of the weights"
        )
    return found


def _tensors(data: memoryview, path: Location) -> dict[str, Array]:
    if not data:
        raise Damage("it is empty")
    if bytes(data[:4]) == b"PK\x03\x04":
        if isinstance(path, Path):
            with path.open("rb") as file:
                return _archived(file, data)
        return _archived(BytesIO(data), data)
    if bytes(data[:1]) == b"\x80" and bytes(data[8:9]) != b"{":
        raise Damage(
            "it is a bare pickle, which may hold code and was not executed",
            "save it again with torch.save of torch 1.6 or newer, or as safetensors",
        )
    return _safetensors(data)


def _archived(file: BinaryIO, data: memoryview) -> dict[str, Array]:
    """Flatten nested dicts and lists of tensors, by the names that lead to them."""
    value = torch_archive.load(file, data)
    found: dict[str, Array] = {}
    if isinstance(value, np.ndarray):
        return {"tensor": value}
    waiting: list[tuple[str, Any]] = [("", value)]
    seen: set[int] = set()
    while waiting:
        prefix, value = waiting.pop()
        if isinstance(value, np.ndarray):
            if prefix in found:
                raise Damage(f"two of its tensors have the name {prefix!r}", "give each a name of its own")
            found[prefix] = value
        elif isinstance(value, dict | list | tuple):
            if id(value) in seen:
                continue  # doubled tensors are compared once, and cycles end
            seen.add(id(value))
            items = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += reversed([(f"{prefix}.{key}" if prefix else str(key), item) for key, item in items])
    return found


def _safetensors(data: memoryview) -> dict[str, Array]:
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or bytes(data[8:9]) != b"{":
        raise Damage(
            "it begins like neither a safetensors file nor an archive of torch.save",
            "give a .safetensors, .pt or .bin file, or the folder of a checkpoint",
        )
    if size > min(len(data) - 8, HEADER):
        raise Damage(f"it announces a header of {size} bytes, but the file has {len(data)}")
    try:
        header = parse_json(bytes(data[8 : 8 + size]))
    except TwiceError as error:
        raise Damage(
            f"two of its tensors have the name {error.key!r}", "give each a name of its own"
        ) from None
    except ValueError as error:
        raise Damage(f"its header is not JSON that can be read ({error})") from None
    if not isinstance(header, dict):
        raise Damage("its header is not a JSON object")
    header.pop("__metadata__", None)
    body = data[8 + size :]
    found = {name: _tensor(name, entry, body) for name, entry in header.items()}
    total = sum(array.nbytes for array in found.values())
    if total != len(body):
        raise Damage(f"its tensors need {total} bytes, but {len(body)} follow the header")
    return found


def _tensor(name: str, entry: Any, body: memoryview) -> Array:
    if not name.isprintable():
        raise Damage(f"its tensor {name[:80]!r} has a name that cannot be printed", "give it another name")
    match entry:
        case {"dtype": str(code), "shape": list(shape), "data_offsets": [int(start), int(end)]}:
            if code not in _DTYPES:
                raise Damage(
                    f"its tensor {name!r} has the type {code[:80]!r}",
                    f"types that can be compared are {', '.join(_DTYPES)}",
                )
            dtype = DTYPES[_DTYPES[code]]
            if any(type(extent) is not int or extent < 0 for extent in shape) or not 0 <= start <= end:
                raise Damage(f"its tensor {name!r} has no usable shape or place")
            if math.prod(shape) * dtype.itemsize != end - start or end > len(body):
                raise Damage(
                    f"its tensor {name!r} of shape {shape} claims the bytes {start}:{end} of {len(body)}"
                )
            try:
                return np.frombuffer(body[start:end], dtype).reshape(shape)
            except ValueError as error:  # sizes beyond those of arrays, beside one of 0
                raise Damage(f"its tensor {name!r} has no usable shape ({error})") from None
    raise Damage(f"its header says nothing usable of {name!r}")


def is_tensor_file(path: Location) -> bool:
    """Return True if a file is named like a file of tensors."""
    return path.suffix in SUFFIXES and path.is_file()
