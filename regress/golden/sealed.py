"""JSON documents with their own checksum: sorted keys, one value per line."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from regress.dump.jsontext import Json, dumps, loads, plain, tag_floats
from regress.errors import DumpError, GoldenError
from regress.inputs import DOCUMENT, read_bytes

SCHEMA_VERSION = 1

_STRING = rb'"(?:[^"\\]|\\.)*"'
_LINE = re.compile(rb"(?:%s: )?(?:%s|[\w.+-]+|[{[]|[}\]]|\{\}|\[\]),?" % (_STRING, _STRING))
_KEY = re.compile(rb"(\n *%s:) " % _STRING)
_BREAK = re.compile(rb"\n *")

T = TypeVar("T")


def checksum(tree: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a document without its own checksum; raises `GoldenError` for values that JSON
    cannot hold.
    """
    return hashlib.sha256(dumps(_plain(tree)).encode()).hexdigest()


def seal(tree: Mapping[str, Any]) -> str:
    """Return the file of a document: one text for one content."""
    whole = _plain(tree) | {"sha256": checksum(tree)}
    return json.dumps(tag_floats(whole), sort_keys=True, indent=1, allow_nan=False) + "\n"


def _plain(tree: Mapping[str, Any]) -> dict[str, Json]:
    try:
        return plain({"schema_version": SCHEMA_VERSION, **tree}, "manifest")  # type: ignore[return-value]  # a dict in, a dict out
    except DumpError as error:
        raise GoldenError(f"the manifest cannot be written: {error}") from None


def read_sealed(path: Path, parse: Callable[[dict[str, Any]], T], remedy: str) -> T | None:
    """Read a document and return the result of `parse`, or None when there is no such file.

    Raises `GoldenError` naming the file when it is unreadable, damaged, edited, or of another schema; `parse` may
    raise `ValueError` and its like.
    """
    try:
        data = read_bytes(path, DOCUMENT)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise GoldenError(f"{path} cannot be read ({error.strerror}): check its permissions") from error
    try:
        return parse(_unseal(data))
    except (GoldenError, *_UNPARSED) as error:
        if _is_converted(data):
            raise GoldenError(
                f"{path} has other line endings than it was written with, as git makes them where core.autocrlf is "
                f"set: add the line '* -text' to {path.parent.parent / '.gitattributes'}, remove {path.parent}, and "
                "check it out again"
            ) from None
        raise GoldenError(f"{path} is damaged ({error}): {remedy}") from None


_UNPARSED = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""Exceptions that the content of a damaged document raises."""


def _is_converted(data: bytes) -> bool:
    """Return True if a file is intact but for its line endings."""
    if b"\r\n" not in data:
        return False
    try:
        _unseal(data.replace(b"\r\n", b"\n"))
    except (GoldenError, *_UNPARSED):
        return False
    return True


def _is_sealed(data: bytes, found: object) -> bool:
    """Return True if a file is the text of its content, by its bytes: without breaks it is what was summed up."""
    whole = data.replace(b',\n "sha256": "%s"' % str(found).encode(), b"", 1)
    summed = _BREAK.sub(b"", _KEY.sub(rb"\1", whole))
    return hashlib.sha256(summed).hexdigest() == found and _is_indented(data)


def _is_indented(data: bytes) -> bool:
    """Return True if each line is one value or bracket, behind a blank for each bracket that is open."""
    depth, opened, (*lines, end) = 0, False, data.split(b"\n")
    for line in lines:
        text = line.lstrip(b" ")
        closes = text[:1] in (b"}", b"]")
        depth -= closes
        if len(line) - len(text) != depth or (closes and opened) or not _LINE.fullmatch(text):
            return False
        opened = text[-1:] in (b"{", b"[")
        depth += opened
    return not end


def _unseal(data: bytes) -> dict[str, Any]:
    tree = loads(data)
    if not isinstance(tree, dict) or tree.get("schema_version") != SCHEMA_VERSION:
        version = tree.get("schema_version") if isinstance(tree, dict) else None
        raise ValueError(f"schema version {version}, this release reads {SCHEMA_VERSION}")
    found = tree.pop("sha256", None)
    if not _is_sealed(data, found):
        same = found == checksum(tree)
        raise ValueError(
            "its text is not what its content is written as"
            if same
            else "its content does not match its checksum"
        )
    del tree["schema_version"]
    return tree
