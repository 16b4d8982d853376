"""Manifest of a case: its files, its tolerances, and its provenance.

Replacing this one file is the commit of an update: all other files are named by their content.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regress.dump.files import Stamp
from regress.dump.jsontext import Json
from regress.golden.entries import TruthEntry, stamp_from_json
from regress.golden.names import MANIFEST, is_input, is_word, parse_where
from regress.golden.sealed import checksum, read_sealed, seal
from regress.golden.tolerance import ToleranceEntry

Inputs = Mapping[str, Stamp]
Truth = Mapping[str, Mapping[str, TruthEntry]]
Tolerances = Mapping[str, Mapping[str, ToleranceEntry]]

_KEYS = {"inputs", "truth", "tolerances", "provenance"}


@dataclass(frozen=True)
class Manifest:
    """Manifest of one recorded case.

    Attributes:
        inputs: path within the case -> stamp.
        truth: update (`step_000000`) -> quantity -> file and tensors.
        tolerances: quantity -> precision -> bound.
        provenance: place and software of the last changing recording, see `regress.golden.provenance`.
    """

    inputs: Inputs = field(default_factory=dict)
    truth: Truth = field(default_factory=dict)
    tolerances: Tolerances = field(default_factory=dict)
    provenance: Mapping[str, Json] = field(default_factory=dict)

    def content(self) -> dict[str, Any]:
        """Return everything but the provenance, as plain JSON; two manifests are the same if this is."""
        return {
            "inputs": {path: dict(vars(stamp)) for path, stamp in self.inputs.items()},
            "truth": {w: {q: e.to_json() for q, e in row.items()} for w, row in self.truth.items()},
            "tolerances": {q: {p: e.to_json() for p, e in row.items()} for q, row in self.tolerances.items()},
        }

    def to_json(self) -> dict[str, Any]:
        """Return the whole manifest as a plain dict that `from_json` reads."""
        return self.content() | {"provenance": dict(self.provenance)}

    @classmethod
    def from_json(cls, tree: Any) -> Manifest:
        """Rebuild a manifest; raises `ValueError` and its like for anything malformed."""
        if not isinstance(tree, dict) or tree.keys() != _KEYS:
            raise ValueError(f"it does not consist of {', '.join(sorted(_KEYS))}")
        if not isinstance(tree["provenance"], dict):
            raise ValueError("its provenance is no mapping")  # noqa: TRY004 - the reader catches one kind of damage
        return cls(
            inputs_from_json(tree["inputs"]),
            {where: truth_from_json(row, where) for where, row in tree["truth"].items()},
            tolerances_from_json(tree["tolerances"]),
            tree["provenance"],
        )

    @property
    def sha256(self) -> str:
        """Hash of the whole manifest; raises `GoldenError` for values that JSON cannot hold."""
        return checksum(self.to_json())

    @property
    def text(self) -> str:
        """Text of the manifest file."""
        return seal(self.to_json())

    @property
    def files(self) -> set[str]:
        """Truth files that the manifest names, by their path within the case."""
        return {entry.file for row in self.truth.values() for entry in row.values()}


def read_manifest(folder: Path) -> Manifest | None:
    """Return the verified manifest of a case, or None when nothing was recorded yet.

    Raises `GoldenError` naming the file when it is unreadable, damaged, or of another schema.
    """
    return read_sealed(folder / MANIFEST, Manifest.from_json, "restore it from version control")


def inputs_from_json(data: Any) -> dict[str, Stamp]:
    """Rebuild the stamps of the inputs; raises `ValueError` for anything malformed, such as a path that
    leaves the case.
    """
    for path in data:
        if not is_input(path):
            raise ValueError(f"{path!r} is no path of an input within the case")
    return {path: stamp_from_json(row) for path, row in data.items()}


def truth_from_json(data: Any, where: str) -> dict[str, TruthEntry]:
    """Rebuild the quantities of one update; raises `ValueError` for anything malformed."""
    if parse_where(where) is None or not isinstance(data, dict) or not data:
        raise ValueError(f"{where!r} is no optimizer update with quantities")
    for quantity in data:
        if not is_word(quantity):
            raise ValueError(f"{quantity!r} is no quantity")
    return {quantity: TruthEntry.from_json(row, where, quantity) for quantity, row in data.items()}


def tolerances_from_json(data: Any) -> dict[str, dict[str, ToleranceEntry]]:
    """Rebuild the tolerances; raises `ValueError` for anything malformed."""
    for name in (*data, *(precision for row in data.values() for precision in row)):
        if not is_word(name):
            raise ValueError(f"{name!r} is no quantity or precision")
    return {q: {p: ToleranceEntry.from_json(entry) for p, entry in row.items()} for q, row in data.items()}
