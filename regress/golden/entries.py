"""Manifest entries of a truth file: its hash, and the hash, type, shape and statistics of each tensor."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from regress.dump.arrays import DTYPES, Array, dtype_name, raw
from regress.dump.files import Stamp
from regress.golden.names import truth_file

_HASH = re.compile(r"[0-9a-f]{64}")
_SHAPE = re.compile(r"scalar|(0|[1-9]\d*)(x(0|[1-9]\d*))*", re.ASCII)
_DIGITS = 9  # statistics are for readers of a diff; comparisons use the values themselves


@dataclass(frozen=True)
class TensorEntry:
    """One tensor; the statistics are rounded for the reader and None where there is no element.

    Attributes:
        shape: `57x16`, or `scalar`: one value, so one line.
        absmax, l2: largest absolute value, and Euclidean norm.
    """

    sha256: str
    dtype: str
    shape: str
    min: float | None
    max: float | None
    mean: float | None
    absmax: float | None
    l2: float | None

    @classmethod
    def of(cls, array: Array) -> TensorEntry:
        """Describe an array of finite values; sums are exactly rounded, so all processors write the same."""
        text = "x".join(map(str, array.shape)) or "scalar"
        name, sha256 = dtype_name(array.dtype), hashlib.sha256(raw(array)).hexdigest()
        values = array.astype(np.float64).reshape(-1)
        if not values.size:
            return cls(sha256, name, text, None, None, None, None, None)
        absmax = float(np.abs(values).max())
        units = (values / (absmax or 1.0)).tolist()  # neither sums nor squares of these can overflow
        mean = math.fsum(units) / len(units) * absmax
        norm = math.sqrt(math.fsum(unit * unit for unit in units)) * absmax
        found = (float(values.min()), float(values.max()), mean, absmax, norm)
        return cls(sha256, name, text, *map(_rounded, found))

    @classmethod
    def from_json(cls, data: Any) -> TensorEntry:
        """Rebuild an entry; raises `ValueError` for anything malformed."""
        names = [item.name for item in fields(cls)]
        if not isinstance(data, Mapping) or data.keys() != set(names):
            raise ValueError(f"a tensor does not consist of {', '.join(names)}")
        entry = cls(**data)
        numbers = (entry.min, entry.max, entry.mean, entry.absmax, entry.l2)
        if not (
            is_hash(entry.sha256)
            and entry.dtype in DTYPES
            and isinstance(entry.shape, str)
            and _SHAPE.fullmatch(entry.shape)
            and all(number is None or type(number) in (int, float) for number in numbers)
        ):
            raise ValueError("a tensor has a malformed hash, type, shape or statistic")
        return entry


@dataclass(frozen=True)
class TruthEntry:
    """One truth file: path within the case, stamp, and its tensors by name."""

    file: str
    stamp: Stamp
    tensors: Mapping[str, TensorEntry]

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict that `from_json` reads."""
        tensors = {name: vars(entry) for name, entry in self.tensors.items()}
        return {"file": self.file, **vars(self.stamp), "tensors": tensors}

    @classmethod
    def from_json(cls, data: Any, where: str, quantity: str) -> TruthEntry:
        """Rebuild an entry; raises `ValueError`, also for a file other than the one its hash names."""
        if not isinstance(data, Mapping) or data.keys() != {"file", "size", "sha256", "tensors"}:
            raise ValueError(
                f"the truth of {where}/{quantity} does not consist of file, size, sha256, tensors"
            )
        stamp = stamp_from_json({"size": data["size"], "sha256": data["sha256"]})
        if data["file"] != truth_file(where, quantity, stamp.sha256):
            raise ValueError(
                f"the truth of {where}/{quantity} lies in {data['file']!r}, not where it belongs"
            )
        if not isinstance(data["tensors"], Mapping) or not data["tensors"]:
            raise ValueError(f"the truth of {where}/{quantity} has no tensors")
        tensors = {name: TensorEntry.from_json(row) for name, row in data["tensors"].items()}
        return cls(data["file"], stamp, tensors)


def is_hash(value: object) -> bool:
    """Return True if `value` is a SHA-256 in hex."""
    return isinstance(value, str) and _HASH.fullmatch(value) is not None


def stamp_from_json(data: Any) -> Stamp:
    """Return the stamp of a file (size and hash); raises `ValueError` for anything malformed."""
    if not isinstance(data, Mapping) or data.keys() != {"size", "sha256"}:
        raise ValueError("a file does not consist of size and sha256")
    if type(data["size"]) is not int or data["size"] < 0 or not is_hash(data["sha256"]):
        raise ValueError("a file has a malformed size or hash")
    return Stamp(data["size"], data["sha256"])


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
