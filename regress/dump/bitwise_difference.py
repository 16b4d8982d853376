"""Bitwise comparison of two dumps of the same layout: a replay against its recording."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from regress.dump.canonical_json import dumps
from regress.dump.dump_location import Location
from regress.dump.dump_reader import DumpReader
from regress.dump.numpy_arrays import Array, raw
from regress.dump.record import Record
from regress.errors import DumpError


@dataclass(frozen=True)
class Difference:
    """One difference between two dumps: a file, and the tensor or metadata in it."""

    file: str
    what: str


@dataclass(frozen=True)
class Comparison:
    """Amount compared, and every difference in the order of computation."""

    records: int
    tensors: int
    differences: list[Difference]


def compare_bitwise(first: str | Location, second: str | Location) -> Comparison:
    """Compare all records of two complete dumps byte for byte: dtype, shape, data and metadata.

    Raises `DumpError` when a dump is incomplete or damaged, or when there is nothing to compare.
    """
    ours, theirs = DumpReader(first), DumpReader(second)
    names = list(dict.fromkeys([*ours.names(), *theirs.names()]))
    if not names:
        raise DumpError(
            f"{first} and {second} hold no records, so nothing could be compared: record something"
        )
    tensors = 0
    differences: list[Difference] = []
    for name in names:
        if name not in ours.manifest.files or name not in theirs.manifest.files:
            where = first if name in ours.manifest.files else second
            differences.append(Difference(name, f"only in {where}"))
            continue
        a, b = ours.read(name), theirs.read(name)
        tensors += len(a.tensors)
        differences += [Difference(name, what) for what in _differences(a, b)]
    return Comparison(len(names), tensors, differences)


def _differences(a: Record, b: Record) -> Iterator[str]:
    for name in dict.fromkeys([*a.tensors, *b.tensors]):
        if name not in a.tensors or name not in b.tensors:
            yield f"{name}: only in the {'first' if name in a.tensors else 'second'} dump"
        elif (what := _unequal(a.tensors[name], b.tensors[name])) is not None:
            yield f"{name}: {what}"
    meta_a, meta_b = ({key: dumps(value) for key, value in record.meta.items()} for record in (a, b))
    keys = [key for key in dict.fromkeys([*meta_a, *meta_b]) if meta_a.get(key) != meta_b.get(key)]
    if a.where != b.where or keys:  # compared as text: a NaN does not equal itself, its text does
        yield f"metadata: {', '.join(keys) or 'coordinates'}"


def _unequal(a: Array, b: Array) -> str | None:
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{a.dtype.name}{list(a.shape)} and {b.dtype.name}{list(b.shape)}"
    if raw(a) == raw(b):
        return None
    width = a.dtype.itemsize
    bytes_a, bytes_b = (np.frombuffer(raw(x), np.uint8).reshape(-1, width) for x in (a, b))
    count = int((bytes_a != bytes_b).any(axis=1).sum())
    with np.errstate(all="ignore"):
        x, y = a.astype(np.float64), b.astype(np.float64)
        apart, largest = np.nanmax(np.abs(x - y), initial=0.0), np.nanmax(np.abs(x), initial=0.0)
    return f"{count} of {a.size} elements differ, by at most {apart:.3g} (largest value {largest:.3g})"
