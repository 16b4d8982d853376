"""The pt format: `torch.save` of plain dicts and tensors under NexRL's keys, for `weights_only=True`.

A SHA-256 over the whole file stands in the comment that a zip archive may carry at its end, so damage is
found before anything parses the file. A pickle is never executed: `regress.dump.formats.torch_archive` reads plain
values.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np

from regress.dump.file_damage import Damage
from regress.dump.formats import torch_archive
from regress.dump.nexrl_files import read_foreign
from regress.dump.numpy_arrays import Array, to_numpy, to_torch
from regress.dump.record import Record
from regress.dump.record_payload import from_payload, normalized, to_payload

if TYPE_CHECKING:
    import torch

NAME = "pt"

_SEAL = b"regress-sha256:"
_SEAL_SIZE = len(_SEAL) + 64
_END = (
    b"PK\x05\x06"  # opens the last record of a zip archive; its last two bytes give the length of the comment
)


def encode(record: Record) -> list[bytes | memoryview]:
    """Return the file as one archive and its seal."""
    import torch

    buffer = io.BytesIO()
    torch.save(_tensors(to_payload(normalized(record)), {}), buffer)
    view = buffer.getbuffer()
    if bytes(view[-22:-18]) != _END or bytes(view[-2:]) != b"\0\0":
        raise Damage("torch.save wrote an archive that does not end as expected")
    view[-2:] = _SEAL_SIZE.to_bytes(2, "little")
    return [view, _SEAL + hashlib.sha256(view).hexdigest().encode()]


def _tensors(value: Any, memo: dict[int, torch.Tensor]) -> Any:
    """Replace arrays by tensors, the same array by the same tensor."""
    if isinstance(value, np.ndarray):
        return memo.setdefault(id(value), to_torch(value))
    if isinstance(value, dict):
        return {key: _tensors(item, memo) for key, item in value.items()}
    return value


def matches(data: bytes) -> bool:
    """Return True if `data` begins like a zip archive or a bare pickle."""
    return data[:4] == b"PK\x03\x04" or data[:1] == b"\x80"


def decode(data: bytes) -> list[Record]:
    """Return the record of a file; raises `Damage` if it is damaged or unsafe. Never executes a pickle."""
    sealed = data[-_SEAL_SIZE:].startswith(_SEAL)
    if sealed and hashlib.sha256(data[:-_SEAL_SIZE]).hexdigest().encode() != data[-64:]:
        raise Damage("its content does not match its checksum")
    payload = content(data)
    if sealed and isinstance(payload, dict) and "regress" in payload:
        return [from_payload(payload, _to_numpy)]
    return [read_foreign(payload, _to_numpy)]


def content(data: bytes) -> Any:
    """Return the plain values and tensors of a file; raises `Damage` if it is damaged or unsafe."""
    if data[:1] == b"\x80":
        raise Damage("it is a bare pickle, which may hold code and was not executed")
    _check_archive(data)
    return torch_archive.load(io.BytesIO(data), memoryview(data))


def _check_archive(data: bytes) -> None:
    """Verify the checksums of all members, which torch ignores, and refuse members that grow on unpacking."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as members:
            if any(member.compress_type != zipfile.ZIP_STORED for member in members.infolist()):
                raise Damage("it is compressed, which torch.save never does")
            damaged = members.testzip()
    except (zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError, OSError) as error:
        raise Damage(f"it is cut off or damaged as an archive ({error})") from None
    if damaged is not None:
        raise Damage(f"its member {damaged!r} does not match its checksum")


def _to_numpy(leaf: Any) -> Array:
    if not isinstance(leaf, np.ndarray):
        raise Damage("a tensor is missing from it")
    return to_numpy(leaf, "tensor")
