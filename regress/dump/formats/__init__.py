"""File formats, one module each; all of them restore a record bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from regress.dump.formats import jsonl_format, pt_format, safetensors_format
from regress.dump.record import Record
from regress.errors import DumpError

Chunks: TypeAlias = Sequence[bytes | memoryview]


@dataclass(frozen=True)
class Format:
    """One file format: encoding of a record, recognition of files, and decoding of all records of a file.

    `decode` raises `Damage`, or a parser's own exception, for any damage.
    """

    name: str
    encode: Callable[[Record], Chunks]
    matches: Callable[[bytes], bool]
    decode: Callable[[bytes], list[Record]]


FORMATS = {
    module.NAME: Format(module.NAME, module.encode, module.matches, module.decode)
    for module in (safetensors_format, pt_format, jsonl_format)
}


def format_named(name: str) -> Format:
    """Return the format of that name, which is also its file suffix; raises `DumpError` listing the names."""
    if name not in FORMATS:
        raise DumpError(f"dump format {name!r} does not exist: choose one of {', '.join(FORMATS)}")
    return FORMATS[name]
