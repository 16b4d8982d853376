"""Manifest of a case: what a reviewer reads in ``git diff``, and what every other file is verified against.

It is JSON with sorted keys and a line for each tensor: shape, type, statistics and hash.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from regress.dump.canonical_json import Json, dumps, loads, plain, tag_floats
from regress.dump.numpy_arrays import DTYPES, Array, dtype_name, raw
from regress.durable_files import Stamp
from regress.errors import DumpError, GoldenError
from regress.golden.golden_files import MANIFEST, is_input, is_word, parse_where, truth_file
from regress.json_schema import Count, Finite, Hash, Matches, conform
from regress.untrusted_files import DOCUMENT, read_bytes

SCHEMA_VERSION = 2
_DIGITS = 9  # statistics are for readers of a diff; comparisons use the values themselves
_Shape = Annotated[str, Matches(r"scalar|(0|[1-9]\d*)(x(0|[1-9]\d*))*", "a shape such as 57x16 or scalar")]
_DType = Annotated[str, Matches("|".join(DTYPES), "a dtype")]


@dataclass(frozen=True)
class TensorEntry:
    """One tensor; the statistics are rounded for the reader and None where there is no element.

    Attributes:
        shape: `57x16`, or `scalar`.
        absmax, l2: largest absolute value, and Euclidean norm.
    """

    sha256: Hash
    dtype: _DType
    shape: _Shape
    min: Finite | None
    max: Finite | None
    mean: Finite | None
    absmax: Finite | None
    l2: Finite | None

    @classmethod
    def of(cls, array: Array) -> TensorEntry:
        """Describe an array of finite values; sums are exactly rounded, so all processors write the same."""
        sha256, (dtype, shape) = hashlib.sha256(raw(array)).hexdigest(), kind_of(array)
        values = array.astype(np.float64).reshape(-1)
        if not values.size:
            return cls(sha256, dtype, shape, None, None, None, None, None)
        absmax = float(np.abs(values).max())
        units = (values / (absmax or 1.0)).tolist()  # neither sums nor squares of these can overflow
        mean = math.fsum(units) / len(units) * absmax
        norm = math.sqrt(math.fsum(unit * unit for unit in units)) * absmax
        found = (float(values.min()), float(values.max()), mean, absmax, norm)
        return cls(sha256, dtype, shape, *(float(f"{value:.{_DIGITS}g}") for value in found))


def kind_of(array: Array) -> tuple[str, str]:
    """Return dtype and shape as an entry has them: ``("float64", "57x16")``."""
    return dtype_name(array.dtype), "x".join(map(str, array.shape)) or "scalar"


@dataclass(frozen=True)
class TruthEntry:
    """One truth file: its stamp, and its tensors by name."""

    stamp: Stamp
    tensors: Mapping[str, TensorEntry]


@dataclass(frozen=True)
class ToleranceEntry:
    """A measured bound on ``max |actual - golden| <= relative * max |golden| + absolute``, with its basis and reason.

    Attributes:
        relative: the bound; None where the quantity cannot be judged at this precision, which `reason` explains.
        absolute: added to ``relative * scale``.
        basis: measurements, as plain JSON, such as ``{"perturbation": 2.1e-6, "kappa": 4}``.
        reason: one sentence for the reader of a failure.
        tensors: bounds of tensors that cannot share that of their quantity, by patterns of their names.
    """

    relative: float | None
    absolute: float = 0.0
    basis: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    tensors: Mapping[str, ToleranceEntry] = field(default_factory=dict)

    @property
    def bound(self) -> str:
        """Bound in words: `2.3e-06 of the scale`, `4.0e-09`, `not judged`."""
        if self.relative is None:
            return "not judged"
        parts = [f"{self.relative:.2g} of the scale"] if self.relative or not self.absolute else []
        return " + ".join(parts + ([f"{self.absolute:.2g}"] if self.absolute else []))

    def problem(self) -> str | None:
        """Return the problem of the tolerance as a clause, or None."""
        for name, value in (("absolute", self.absolute), ("relative", self.relative)):
            if name == "relative" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                return f"has {name} = {value!r}, but a tolerance is a finite number of at least 0"
        if not isinstance(self.reason, str) or not self.reason.strip():
            return "has no reason, but a tolerance is never set without one"
        for pattern, entry in self.tensors.items():
            if entry.tensors or entry.relative is None:
                return f"has one for {pattern} that is not a plain bound: give it relative and absolute"
            if (problem := entry.problem()) is not None:
                return f"has one for {pattern} that {problem}"
        return None

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict that `from_json` reads."""
        tensors = {pattern: entry.to_json() for pattern, entry in self.tensors.items()}
        numbers = {"relative": self.relative, "absolute": self.absolute}
        row = {name: None if value is None else float(value) for name, value in numbers.items()}
        return {
            **row,
            "basis": dict(self.basis),
            "reason": self.reason,
            **({"tensors": tensors} if tensors else {}),
        }

    @classmethod
    def from_json(cls, data: Any) -> ToleranceEntry:
        """Rebuild an entry; raises `ValueError` for anything malformed."""
        _keys(data, {"relative", "absolute", "basis", "reason"}, "a tolerance", optional={"tensors"})
        conform(data["basis"], dict[str, Any], "the basis of a tolerance")
        own: dict[str, Any] = conform(data.get("tensors", {}), dict[str, Any], "the tensors of a tolerance")
        entry = cls(**{**data, "tensors": {pattern: cls.from_json(row) for pattern, row in own.items()}})
        if (problem := entry.problem()) is not None:
            raise ValueError(f"a tolerance {problem}")
        return entry


@dataclass(frozen=True)
class Manifest:
    """Manifest of one recorded case.

    Attributes:
        inputs: path within the case -> stamp.
        truth: update (`step_000000`) -> quantity -> file and tensors.
        tolerances: quantity -> precision -> bound.
        provenance: place and software of the last changing recording, see `regress.golden.golden_provenance`.
    """

    inputs: Mapping[str, Stamp] = field(default_factory=dict)
    truth: Mapping[str, Mapping[str, TruthEntry]] = field(default_factory=dict)
    tolerances: Mapping[str, Mapping[str, ToleranceEntry]] = field(default_factory=dict)
    provenance: Mapping[str, Json] = field(default_factory=dict)

    @property
    def files(self) -> set[str]:
        """Truth files that the manifest names, by their path within the case."""
        return {truth_file(where, quantity) for where, row in self.truth.items() for quantity in row}

    def content(self) -> dict[str, Any]:
        """Return everything but the provenance, as plain JSON; two manifests are the same if this is."""
        return {
            "inputs": {path: dict(vars(stamp)) for path, stamp in self.inputs.items()},
            "truth": {
                where: {quantity: _truth_row(entry) for quantity, entry in row.items()}
                for where, row in self.truth.items()
            },
            "tolerances": {q: {p: e.to_json() for p, e in row.items()} for q, row in self.tolerances.items()},
        }

    @property
    def text(self) -> str:
        """Text of the manifest file; raises `GoldenError` for values that JSON cannot hold."""
        return seal({"schema_version": SCHEMA_VERSION, **self.content(), "provenance": self.provenance})

    @classmethod
    def from_json(cls, tree: Any) -> Manifest:
        """Rebuild a manifest; raises `ValueError` and its like for anything malformed, such as a path that leaves
        the case.
        """
        _keys(tree, {"inputs", "truth", "tolerances", "provenance"}, "it")
        conform(tree["provenance"], dict[str, Any], "its provenance")
        for path in tree["inputs"]:
            if not is_input(path):
                raise ValueError(f"{path!r} is not a path of an input within the case")
        for name in (*tree["tolerances"], *(p for row in tree["tolerances"].values() for p in row)):
            if not is_word(name):
                raise ValueError(f"{name!r} is not a quantity or precision")
        return cls(
            {path: _stamp(row) for path, row in tree["inputs"].items()},
            {where: _truth(row, where) for where, row in tree["truth"].items()},
            {
                quantity: {precision: ToleranceEntry.from_json(entry) for precision, entry in row.items()}
                for quantity, row in tree["tolerances"].items()
            },
            tree["provenance"],
        )


def seal(tree: Mapping[str, Any]) -> str:
    """Return a document with its checksum as text: one text for one content."""
    try:
        whole: Any = plain(tree, "manifest")
    except DumpError as error:
        raise GoldenError(f"the manifest cannot be written: {error}") from None
    return _lines(tag_floats(whole | {"sha256": checksum(whole)})) + "\n"


def read_manifest(folder: Path) -> Manifest | None:
    """Return the verified manifest of a case, or None when nothing was recorded yet.

    Raises `GoldenError` naming the file when it is unreadable, damaged, edited, or of another schema.
    """
    path = folder / MANIFEST
    try:
        tree = loads(read_bytes(path, DOCUMENT))
        if not isinstance(tree, dict) or (version := tree.get("schema_version")) != SCHEMA_VERSION:
            version = version if isinstance(tree, dict) else None
            if version == 1:
                raise GoldenError(
                    f"{path} is of schema 1, this release reads {SCHEMA_VERSION}: run regress golden migrate"
                )
            raise ValueError(f"schema version {version}, this release reads {SCHEMA_VERSION}")
        if tree.pop("sha256", None) != checksum(tree):
            raise ValueError("its content does not match its checksum")
        del tree["schema_version"]
        return Manifest.from_json(tree)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise GoldenError(f"{path} cannot be read ({error.strerror}): check its permissions") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, DumpError) as error:
        raise GoldenError(f"{path} is damaged ({error}): restore it from version control") from None


def _truth(data: Any, where: str) -> dict[str, TruthEntry]:
    if parse_where(where) is None or not isinstance(data, dict) or not data:
        raise ValueError(f"{where!r} is not an optimizer update with quantities")
    found = {}
    for quantity, row in data.items():
        if not is_word(quantity):
            raise ValueError(f"{quantity!r} is not a quantity")
        name = f"the truth of {where}/{quantity}"
        _keys(row, {"size", "sha256", "tensors"}, name)
        stamp = _stamp({key: row[key] for key in ("size", "sha256")})
        if not isinstance(row["tensors"], dict) or not row["tensors"]:
            raise ValueError(f"{name} has no tensors")
        found[quantity] = TruthEntry(stamp, {n: _tensor(t) for n, t in row["tensors"].items()})
    return found


def _truth_row(entry: TruthEntry) -> dict[str, Any]:
    tensors = {name: vars(tensor) for name, tensor in entry.tensors.items()}
    return {**vars(entry.stamp), "tensors": tensors}


def _tensor(data: Any) -> TensorEntry:
    _keys(data, {item.name for item in fields(TensorEntry)}, "a tensor")
    return TensorEntry(**conform(data, TensorEntry, "a tensor"))


def _stamp(data: Any) -> Stamp:
    _keys(data, {"size", "sha256"}, "a file")
    return Stamp(conform(data["size"], Count, "a size"), conform(data["sha256"], Hash, "a hash"))


def _keys(data: Any, required: set[str], what: str, optional: Collection[str] = ()) -> None:
    if not isinstance(data, dict) or data.keys() - {*optional} != required:
        raise ValueError(f"{what} does not consist of {', '.join(sorted(required))}")


def checksum(tree: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a document's content in hex."""
    return hashlib.sha256(dumps(tree).encode()).hexdigest()


def _lines(value: Any, depth: int = 0) -> str:
    """Return JSON with one line for each object that holds no other object: a tensor, a stamp, a basis."""
    if not isinstance(value, dict) or (depth and not any(isinstance(item, dict) for item in value.values())):
        return json.dumps(value, sort_keys=True, allow_nan=False)
    pad = " " * (depth + 1)
    rows = (f"{pad}{json.dumps(key)}: {_lines(value[key], depth + 1)}" for key in sorted(value))
    return "{\n" + ",\n".join(rows) + f"\n{' ' * depth}}}"
