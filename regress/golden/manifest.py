"""The manifest of a case: what its files are, what may be tolerated, and how it was made.

Replacing this one file is the commit of an update: all other files are named by their content.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regress.dump.files import Stamp
from regress.dump.jsontext import Json, dumps, loads, plain, tag_floats
from regress.errors import DumpError, GoldenError
from regress.golden.entries import TruthEntry, stamp_from_json
from regress.golden.names import MANIFEST, is_input, is_word, parse_where
from regress.golden.tolerance import ToleranceEntry

SCHEMA_VERSION = 1

Inputs = Mapping[str, Stamp]
Truth = Mapping[str, Mapping[str, TruthEntry]]
Tolerances = Mapping[str, Mapping[str, ToleranceEntry]]

_KEYS = {"schema_version", "inputs", "truth", "tolerances", "provenance", "sha256"}


@dataclass(frozen=True)
class Manifest:
    """What was recorded of a case.

    Attributes:
        inputs: path within the case -> stamp.
        truth: update (`step_000000`) -> quantity -> file and tensors.
        tolerances: quantity -> precision -> bound.
        provenance: where and with what the last change was recorded, see `regress.golden.provenance`.
    """

    inputs: Inputs = field(default_factory=dict)
    truth: Truth = field(default_factory=dict)
    tolerances: Tolerances = field(default_factory=dict)
    provenance: Mapping[str, Json] = field(default_factory=dict)

    def content(self) -> dict[str, Any]:
        """Everything but the provenance, as plain JSON: what makes two manifests the same."""
        return {
            "schema_version": SCHEMA_VERSION,
            "inputs": {path: dict(vars(stamp)) for path, stamp in self.inputs.items()},
            "truth": {w: {q: e.to_json() for q, e in row.items()} for w, row in self.truth.items()},
            "tolerances": {q: {p: e.to_json() for p, e in row.items()} for q, row in self.tolerances.items()},
        }

    @property
    def sha256(self) -> str:
        """Hash of all of it, provenance included."""
        return _checksum(self._tree())

    @property
    def text(self) -> str:
        """The file: sorted keys, one value per line; raises `GoldenError` for what JSON cannot hold."""
        tree = self._tree()
        return (
            json.dumps(
                tag_floats(tree | {"sha256": _checksum(tree)}), sort_keys=True, indent=1, allow_nan=False
            )
            + "\n"
        )

    def _tree(self) -> dict[str, Json]:
        try:
            return plain(self.content() | {"provenance": self.provenance}, "manifest")  # type: ignore[return-value]  # a dict in, a dict out
        except DumpError as error:
            raise GoldenError(f"the manifest cannot be written: {error}") from None

    @property
    def files(self) -> set[str]:
        """The truth files it names, by their path within the case."""
        return {entry.file for row in self.truth.values() for entry in row.values()}


def read_manifest(folder: Path) -> Manifest | None:
    """The verified manifest of a case, or None when nothing was recorded yet.

    Raises `GoldenError` naming the file when it is unreadable, damaged, or of another schema.
    """
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise GoldenError(f"{path} cannot be read ({error.strerror}): check its permissions") from error
    try:
        manifest = _from_json(loads(data))
        if manifest.text.encode() != data:
            raise ValueError("its text is not what its content is written as")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise GoldenError(f"{path} is damaged ({error}): restore it from version control") from None
    return manifest


def _from_json(tree: Any) -> Manifest:
    if not isinstance(tree, dict) or tree.get("schema_version") != SCHEMA_VERSION:
        version = tree.get("schema_version") if isinstance(tree, dict) else None
        raise ValueError(f"schema version {version}, this release reads {SCHEMA_VERSION}")
    if tree.keys() != _KEYS:
        raise ValueError(f"it does not consist of {', '.join(sorted(_KEYS))}")
    checksum = tree.pop("sha256")
    if checksum != _checksum(tree):
        raise ValueError("its content does not match its checksum")
    if not isinstance(tree["provenance"], dict):
        raise ValueError("its provenance is no mapping")  # noqa: TRY004 - the reader catches one kind of damage
    return Manifest(
        inputs_from_json(tree["inputs"]),
        {where: truth_from_json(row, where) for where, row in tree["truth"].items()},
        tolerances_from_json(tree["tolerances"]),
        tree["provenance"],
    )


def inputs_from_json(data: Any) -> dict[str, Stamp]:
    """Raises `ValueError` for anything malformed, such as a path that leaves the case."""
    for path in data:
        if not is_input(path):
            raise ValueError(f"{path!r} is no path of an input within the case")
    return {path: stamp_from_json(row) for path, row in data.items()}


def truth_from_json(data: Any, where: str) -> dict[str, TruthEntry]:
    """The quantities of one update; raises `ValueError` for anything malformed."""
    if parse_where(where) is None or not isinstance(data, dict) or not data:
        raise ValueError(f"{where!r} is no optimizer update with quantities")
    for quantity in data:
        if not is_word(quantity):
            raise ValueError(f"{quantity!r} is no quantity")
    return {quantity: TruthEntry.from_json(row, where, quantity) for quantity, row in data.items()}


def tolerances_from_json(data: Any) -> dict[str, dict[str, ToleranceEntry]]:
    """Raises `ValueError` for anything malformed."""
    for name in (*data, *(precision for row in data.values() for precision in row)):
        if not is_word(name):
            raise ValueError(f"{name!r} is no quantity or precision")
    return {q: {p: ToleranceEntry.from_json(entry) for p, entry in row.items()} for q, row in data.items()}


def _checksum(tree: Mapping[str, Json]) -> str:
    return hashlib.sha256(dumps(dict(tree)).encode()).hexdigest()
