"""Archives of ``torch.save``, read without torch: plain values, and tensors as parts of the file.

The pickle in an archive is interpreted by the few names that tensors and plain values need; any other is refused before
it is looked up, so nothing is ever executed. A tensor has to lie within its storage, and a storage within the file:
neither allocates what the file does not hold.
Source of the format: ``torch/serialization.py`` and ``torch/_utils.py``, torch 2.13.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from regress.dump.file_damage import Damage
from regress.dump.numpy_arrays import DTYPES, Array

GROWTH = 16
"""Maximum ratio of an archive's tensor bytes to its own; only tensors that share a storage exceed 1."""

_UNTRUSTED = "only plain values and dense tensors are read: save these with torch.save"
_LOCAL_HEADER = 30
_STORAGES = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
}


@dataclass(frozen=True, slots=True)
class _Name:
    """Type name that is never called: of elements, or of tensors."""

    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class _Storage:
    """Bytes of one member, and the type of its elements; None where the tensor states it."""

    part: memoryview
    dtype: str | None


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Tensor that lies within its storage; steps and offset are in elements."""

    part: memoryview
    dtype: str
    offset: int
    shape: tuple[int, ...]
    steps: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def array(self) -> Array:
        """Return a view of the file where the elements are contiguous, otherwise a copy."""
        dtype = DTYPES[self.dtype]
        if not math.prod(self.shape):
            return np.empty(self.shape, dtype)
        strides = tuple(step * dtype.itemsize for step in self.steps)
        found: Array = np.ndarray(self.shape, dtype, self.part, self.offset * dtype.itemsize, strides)
        return found if found.flags.c_contiguous and found.flags.aligned else np.array(found, order="C")


def load(file: BinaryIO, data: memoryview) -> Any:
    """Read the values of an archive.

    Args:
        file, data: the same bytes as a file that can be sought in, and as they lie in memory or a mapped file.

    Returns:
        Dicts, lists and plain values; tensors are arrays that lie in ``data`` where they can.

    Raises:
        Damage: for anything other than plain values and dense tensors, and for sizes that the file does not
            hold.
    """
    members = _members(file, data)
    name = next((name for name in members if name.rpartition("/")[2] == "data.pkl"), None)
    if name is None:
        raise Damage("it is a zip archive without the data.pkl that torch.save writes")
    root = name.removesuffix("data.pkl")
    if bytes(members.get(f"{root}byteorder", memoryview(b"little"))).strip() != b"little":
        raise Damage("it was written on a big-endian machine", "save it again on a little-endian one")
    reader = _Unpickler(members[name], members, root)
    try:
        return _Values(GROWTH * len(data)).of(reader.load())
    except Damage:
        raise
    except RecursionError:
        raise Damage("its values are nested too deeply") from None
    except Exception as error:  # a damaged stream can raise any of them
        raise Damage(f"its pickle cannot be read ({type(error).__name__})") from None


def _members(file: BinaryIO, data: memoryview) -> dict[str, memoryview]:
    """Return the parts of the file that its members are, none of them compressed."""
    try:
        with zipfile.ZipFile(file) as archive:
            infos = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError, OSError, ValueError) as error:
        raise Damage(f"it is cut off or damaged as an archive ({error})") from None
    found: dict[str, memoryview] = {}
    for info in infos:
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise Damage("it is compressed, which torch.save never does")
        head = bytes(data[info.header_offset : info.header_offset + _LOCAL_HEADER])
        if len(head) < _LOCAL_HEADER or head[:4] != b"PK\x03\x04":
            raise Damage(f"its member {info.filename!r} does not begin where the archive says")
        start = info.header_offset + _LOCAL_HEADER
        start += int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
        if start + info.file_size > len(data):
            raise Damage(
                f"its member {info.filename!r} claims {info.file_size} bytes, more than the file holds"
            )
        if info.filename in found:
            raise Damage(f"its member {info.filename!r} is there twice")
        found[info.filename] = data[start : start + info.file_size]
    return found


class _Unpickler(pickle.Unpickler):
    """Interprets a pickle by the names that tensors and plain values need."""

    def __init__(self, text: memoryview, members: Mapping[str, memoryview], root: str) -> None:
        super().__init__(io.BytesIO(text))
        self._members, self._root = members, root

    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get(f"{module}.{name}")
        if known is not None:
            return known
        if module == "torch" and name.removesuffix("Storage") in _STORAGES:
            return _Name(_STORAGES[name.removesuffix("Storage")])
        if module == "torch" and name in DTYPES:
            return _Name(name)
        if module.partition(".")[0] == "torch":
            raise Damage(
                f"it holds {module}.{name}, which is not a plain value and no dense tensor", _UNTRUSTED
            )
        raise Damage(f"its pickle holds code ({module}.{name}), which was not executed", _UNTRUSTED)

    def persistent_load(self, pid: Any) -> _Storage:
        match pid:
            case ("storage", _Name(dtype), str(key), _, int(count)) if count >= 0:
                part = self._members.get(f"{self._root}data/{key}")
                size = 1 if dtype is None else DTYPES[dtype].itemsize
                if part is None:
                    raise Damage(f"the storage {key!r} of a tensor is missing from it")
                if count * size != len(part):
                    raise Damage(f"the storage {key!r} claims {count * size} bytes and has {len(part)}")
                return _Storage(part, dtype)
        raise Damage("it refers to something else than the storages of its tensors")


def _rebuilt(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> _Tensor:
    """Return a tensor; its last argument may name its dtype."""
    dtypes = [one.dtype for one in rest if isinstance(one, _Name)]
    if not isinstance(storage, _Storage):
        raise Damage("a tensor has no storage")
    dtype = storage.dtype or (dtypes[0] if dtypes else None)
    shape, steps = tuple(size), tuple(stride)
    numbers = (offset, *shape, *steps)
    if dtype is None or len(shape) != len(steps) or any(type(n) is not int or n < 0 for n in numbers):
        raise Damage("a tensor has no usable shape, strides or type")
    known, count = len(storage.part) // DTYPES[dtype].itemsize, math.prod(shape)
    if count > known:
        raise Damage(
            f"a tensor of shape {list(shape)} has {count} elements, but its storage has {known}",
            "a tensor that was expanded has to be saved as contiguous()",
        )
    if count and offset + sum((n - 1) * step for n, step in zip(shape, steps, strict=True)) >= known:
        raise Damage(f"a tensor of shape {list(shape)} reaches beyond its storage of {known} elements")
    return _Tensor(storage.part, dtype, offset, shape, steps)


def _parameter(data: Any, *_: Any) -> Any:
    return data


def _of_type(rebuild: Any, _: Any, arguments: Any, *__: Any) -> Any:
    if rebuild not in (_rebuilt, _parameter):
        raise Damage("a tensor is made by something else than torch's own functions")
    return rebuild(*arguments)


_KNOWN: dict[str, type | _Name | Callable[..., Any]] = {
    "collections.OrderedDict": OrderedDict,
    "builtins.set": set,
    "torch.Size": tuple,
    "torch.Tensor": _Name(),
    "torch.nn.parameter.Parameter": _Name(),
    "torch.storage.UntypedStorage": _Name(),
    "torch._utils._rebuild_tensor_v2": _rebuilt,
    "torch._utils._rebuild_tensor_v3": _rebuilt,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _of_type,
}


class _Values:
    """Converts tensors to arrays, whatever they lie in, up to a number of bytes."""

    def __init__(self, limit: int) -> None:
        self._left = limit
        self._known: dict[int, Any] = {}

    def of(self, value: Any) -> Any:
        if id(value) in self._known:
            return self._known[id(value)]
        if isinstance(value, dict):
            found: dict[Any, Any] = {}
            self._known[id(value)] = found
            found.update((key, self.of(item)) for key, item in dict.items(value))
            return found
        if isinstance(value, list):
            several: list[Any] = []
            self._known[id(value)] = several
            several.extend(map(self.of, value))
            return several
        if isinstance(value, _Storage):
            raise Damage("it holds a storage in place of a tensor")
        if isinstance(value, _Name):
            return f"torch.{value.dtype}"
        if not isinstance(value, _Tensor | tuple):
            return value
        made = self._array(value) if isinstance(value, _Tensor) else tuple(map(self.of, value))
        self._known[id(value)] = made
        return made

    def _array(self, tensor: _Tensor) -> Array:
        self._left -= tensor.nbytes
        if self._left < 0:
            raise Damage(f"its tensors have more than {GROWTH} times the bytes of the file")
        return tensor.array()
