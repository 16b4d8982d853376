"""Stored checks: values that the fixture `regress` has recorded, one file for each test and name under `checks/`.

A small value is text, of which git shows what changed; any other a record of the dump format, whose metadata
hold what the text's header does: test and name, the structure of the value, and the tolerance it was accepted with.
Either carries its own checksum, and is written whole or not at all.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, TypedDict

from regress.dump.coordinates import Coordinates
from regress.dump.file_damage import Damage
from regress.dump.formats import safetensors_format
from regress.dump.record import Record
from regress.errors import DumpError, GoldenError
from regress.golden import stored_check_text
from regress.golden.golden_files import CHECKS
from regress.golden.golden_files import read as read_file
from regress.golden.value_tree import TENSOR, Tree
from regress.json_schema import conform

TEXT, RECORD = ".check", ".safetensors"  # pytest collects what is called test*.txt
REMEDY = "restore it from version control, or record it again with pytest --update-golden=all"

_TYPE = "is_loss_debug"  # the record type of values that belong to no other, as with golden truth
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")
_READABLE = 60  # readable characters of each part of a file name
_DIGITS = 16


@dataclass(frozen=True)
class StoredCheck:
    """Value that a test has accepted.

    Attributes:
        test: id of the test, `tests/test_loss.py::test_kl[0.1]`.
        name: the test's name for the value.
        value: the value.
        rtol, atol, why: the tolerance it was accepted with.
        provenance: place and software of the recording.
    """

    test: str
    name: str
    value: Tree
    rtol: float
    atol: float
    why: str
    provenance: Mapping[str, Any]

    @property
    def path(self) -> str:
        """Path of the file within the golden directory, without its suffix."""
        return check_path(self.test, self.name)

    def same(self, other: StoredCheck) -> bool:
        """Return True if both checks are equal down to the bytes; the provenance may differ."""
        mine, theirs = (replace(one, provenance={}).encode() for one in (self, other))
        return mine == theirs

    @property
    def file(self) -> str:
        """Path of the file within the golden directory."""
        return f"{self.path}{self._encoded[0]}"

    def encode(self) -> bytes:
        """Return the bytes of the file, which depend on nothing but the attributes."""
        return self._encoded[1]

    @cached_property
    def _encoded(self) -> tuple[str, bytes]:
        """Suffix of the file, and its bytes."""
        check = {"test": self.test, "name": self.name}
        tolerance = {"rtol": self.rtol, "atol": self.atol, "why": self.why}
        nodes = [[path, *node] for path, node in self.value.nodes.items()]
        try:
            text = stored_check_text.encode({**check, **tolerance, "provenance": self.provenance}, self.value)
            if text is not None:
                return TEXT, text
            meta = {"check": check, "nodes": nodes, "tolerance": tolerance, "provenance": self.provenance}
            record = Record.of(_TYPE, Coordinates(0), self.value.tensors, meta)
            return RECORD, b"".join(safetensors_format.encode(record))
        except DumpError as error:
            raise GoldenError(f"{self.name!r} of {self.test} cannot be stored: {error}") from None


def check_path(test: str, name: str) -> str:
    """Return the file of a check within the golden directory, without its suffix: readable, and unique for every check.

    A hash of test and name makes it unique, so that file systems may ignore case, and ids may hold any
    character.
    """
    digest = hashlib.sha256(f"{len(test)}:{test}{name}".encode("utf-8", "surrogatepass")).hexdigest()[
        :_DIGITS
    ]
    module, _, function = test.partition("::")
    folder = _readable(module.removesuffix(".py")[-_READABLE:]) or "module"
    return f"{CHECKS}/{folder}/{_readable(function)}-{_readable(name)}.{digest}"


def without_suffix(file: str) -> str:
    """Return the path of a file of a check as `check_path` has it."""
    return file.removesuffix(TEXT).removesuffix(RECORD)


def other_file(file: str) -> str:
    """Return the file in which the same check would lie if it were written the other way."""
    return without_suffix(file) + (RECORD if file.endswith(TEXT) else TEXT)


def _readable(text: str) -> str:
    return _UNSAFE.sub("_", text)[:_READABLE].strip("._-")


def read_check(root: Path, path: str) -> StoredCheck | None:
    """Read a check below the golden directory `root`, every byte verified; None where there is none.

    Args:
        path: the file, with or without its suffix.

    Raises:
        GoldenError: naming a file that is damaged, or that holds another check than its name says.
    """
    path = without_suffix(path)
    files = [file for suffix in (TEXT, RECORD) if (file := root / f"{path}{suffix}").exists()]
    if not files:
        return None
    if len(files) > 1:
        raise GoldenError(f"{files[0]} and {files[1].name} are the same check: keep one")
    file = files[0]
    data = read_file(file)
    try:
        check = _from_text(data) if file.suffix == TEXT else _from_record(*safetensors_format.decode(data))
    except (Damage, DumpError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise GoldenError(f"{file} is not an intact check ({error}): {REMEDY}") from None
    if check.path != path:
        raise GoldenError(f"{file} holds {check.name!r} of {check.test}, which belongs elsewhere: {REMEDY}")
    return check


def _from_record(record: Record) -> StoredCheck:
    meta: Any = record.meta
    nodes = {str(path): (str(kind), str(content)) for path, kind, content in meta["nodes"]}
    if {path for path, node in nodes.items() if node == TENSOR} != record.tensors.keys():
        raise ValueError("its nodes and its tensors differ")
    found = {**meta["check"], **meta["tolerance"], "provenance": meta["provenance"]}
    return StoredCheck(value=Tree(nodes, record.tensors), **conform(found, _Header, "a check"))


def _from_text(data: bytes) -> StoredCheck:
    header, value = stored_check_text.decode(data)
    return StoredCheck(value=value, **conform(header, _Header, "a check"))


class _Header(TypedDict):
    """Content of a check beside its value."""

    test: str
    name: str
    rtol: float
    atol: float
    why: str
    provenance: dict[str, Any]


def is_check(name: object) -> bool:
    """Return True if a path within the golden directory can be that of a stored check."""
    if not isinstance(name, str) or not name.isprintable():
        return False
    path = PurePosixPath(name)
    if path.is_absolute() or str(path) != name or len(path.parts) < 2 or path.parts[0] != CHECKS:
        return False
    return path.suffix in (TEXT, RECORD) and not any(part.startswith(".") for part in path.parts)


def stored_checks(root: Path) -> list[str]:
    """Return the paths within the golden directory of all stored checks, intact or not."""
    found = (path.relative_to(root).as_posix() for path in (root / CHECKS).rglob("*"))
    return sorted(filter(is_check, found))
