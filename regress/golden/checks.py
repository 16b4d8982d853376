"""Stored checks: values that the fixture `regress` has recorded, one file for each test and name under `checks/`.

A file is a record of the dump format, so it carries its own checksum; its metadata holds test and name, the
structure of the value, and the tolerance it was accepted with. It is written whole or not at all.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from regress.dump.coordinates import Coordinates
from regress.dump.damage import Damage
from regress.dump.formats import safetensors
from regress.dump.record import Record
from regress.errors import DumpError, GoldenError
from regress.golden.files import CHECKS
from regress.golden.files import read as read_file
from regress.golden.tree import TENSOR, Tree

SUFFIX = ".safetensors"
REMEDY = "restore it from version control, or record it again with pytest --update-golden=all"

_STAGE = "is_loss_debug"  # the stage of values that belong to no other, as with golden truth
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
        """Path of the file within the golden directory."""
        return check_path(self.test, self.name)

    def same(self, other: StoredCheck) -> bool:
        """Return True if both checks are equal down to the bytes; the provenance may differ."""
        mine, theirs = (replace(one, provenance={}).encode() for one in (self, other))
        return b"".join(mine) == b"".join(theirs)

    def encode(self) -> list[bytes | memoryview]:
        """Return the bytes of the file, which depend on nothing but the attributes."""
        meta = {
            "check": {"test": self.test, "name": self.name},
            "nodes": [[path, *node] for path, node in self.value.nodes.items()],
            "tolerance": {"rtol": self.rtol, "atol": self.atol, "why": self.why},
            "provenance": self.provenance,
        }
        try:
            return safetensors.encode(Record.of(_STAGE, Coordinates(0), self.value.tensors, meta))
        except DumpError as error:
            raise GoldenError(f"{self.name!r} of {self.test} cannot be stored: {error}") from None


def check_path(test: str, name: str) -> str:
    """Return the file of a check within the golden directory: readable, and unique for every check.

    A hash of test and name makes it unique, so that file systems may ignore case, and ids may hold any
    character.
    """
    digest = hashlib.sha256(f"{len(test)}:{test}{name}".encode("utf-8", "surrogatepass")).hexdigest()[
        :_DIGITS
    ]
    module, _, function = test.partition("::")
    folder = _readable(module.removesuffix(".py")[-_READABLE:]) or "module"
    return f"{CHECKS}/{folder}/{_readable(function)}-{_readable(name)}.{digest}{SUFFIX}"


def _readable(text: str) -> str:
    return _UNSAFE.sub("_", text)[:_READABLE].strip("._-")


def read_check(root: Path, path: str) -> StoredCheck | None:
    """Read the check in a file of the golden directory `root`, every byte verified; None where there is no file.

    Raises `GoldenError` naming a file that is damaged, or that holds another check than its name says.
    """
    file = root / path
    if not file.exists():
        return None
    data = read_file(file)
    try:
        (record,) = safetensors.decode(data)
    except (Damage, DumpError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise GoldenError(f"{file} is no intact record ({error}): {REMEDY}") from None
    try:
        check = _from_record(record)
    except (LookupError, TypeError, ValueError, AttributeError):
        raise GoldenError(f"{file} is a record, but none of a check: {REMEDY}") from None
    if check.path != path:
        raise GoldenError(f"{file} holds {check.name!r} of {check.test}, which belongs elsewhere: {REMEDY}")
    return check


def _from_record(record: Record) -> StoredCheck:
    meta: Any = record.meta
    nodes = {str(path): (str(kind), str(content)) for path, kind, content in meta["nodes"]}
    if {path for path, node in nodes.items() if node == TENSOR} != record.tensors.keys():
        raise ValueError("its nodes and its tensors differ")
    tree = Tree(nodes, record.tensors)
    return StoredCheck(**meta["check"], value=tree, **meta["tolerance"], provenance=meta["provenance"])


def is_check(name: object) -> bool:
    """Return True if a path within the golden directory can be that of a stored check."""
    if not isinstance(name, str) or not name.isprintable():
        return False
    path = PurePosixPath(name)
    if path.is_absolute() or str(path) != name or len(path.parts) < 2 or path.parts[0] != CHECKS:
        return False
    return path.suffix == SUFFIX and not any(part.startswith(".") for part in path.parts)


def stored_checks(root: Path) -> list[str]:
    """Return the paths within the golden directory of all stored checks, intact or not."""
    found = (path.relative_to(root).as_posix() for path in (root / CHECKS).rglob(f"*{SUFFIX}"))
    return sorted(filter(is_check, found))
