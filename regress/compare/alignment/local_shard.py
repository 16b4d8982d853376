"""Local tensors as parts of whole ones, and the elements that no rank holds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from regress.compare.alignment.record_keys import Key
from regress.dump.numpy_arrays import Array
from regress.dump.record import Record
from regress.errors import CompareError
from regress.layout import ShardLayout

NOWHERE = Key("", None, None)


@dataclass(frozen=True, eq=False)
class Shard:
    """A local tensor, the part of the whole that it is, and the place of its record where one matters."""

    array: Array
    layout: ShardLayout
    key: Key = NOWHERE


whole_layout = lru_cache(maxsize=1024)(ShardLayout.whole)
"""The layout of a whole tensor of a shape."""


def recorded_shards(record: Record) -> Mapping[str, Any]:
    """Return ``meta["shards"]``; what is not a mapping stands beside each tensor, as none is placed by it."""
    shards: Any = record.meta.get("shards") or {}
    return shards if isinstance(shards, Mapping) else dict.fromkeys(record.tensors, shards)


def local_shard(key: Key, record: Record, name: str) -> Shard:
    """Return a tensor of a record as a shard; it is whole unless ``meta["shards"]`` says otherwise.

    Raises:
        CompareError: if the entry is not a shard layout, or not one of this local tensor.
    """
    array = record.tensors[name]
    shards = recorded_shards(record)
    if name not in shards:
        return Shard(array, whole_layout(array.shape), key)
    try:
        layout = ShardLayout.from_json(shards[name])
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise CompareError(
            f"{name} in {key} has no usable shard layout ({type(error).__name__}: {error}); write "
            'ShardLayout.to_json() into meta["shards"]'
        ) from None
    if layout.local_shape != array.shape:
        raise CompareError(f"""{name} in {key} has the shape {list(array.shape)}, but its shard layout is that of a part
        of the shape {list(layout.local_shape)}""")
    return Shard(array, layout, key)


def flat_index(place: Sequence[int], shape: tuple[int, ...]) -> int:
    """Return the flat index of an element; a tensor without dimensions has one, 0."""
    return int(np.ravel_multi_index(tuple(place), shape)) if shape else 0


def uncovered(shape: tuple[int, ...], layouts: Iterable[ShardLayout]) -> tuple[int, int] | None:
    """Count the elements of a tensor that lie in none of the layouts; return the count and the first flat index.

    Return None if every element lies in some layout.

    The tensor is cut at the edges of all ranges; no array of its size is made.
    """
    known = set(layouts)
    if any(layout.is_whole for layout in known):
        return None
    cuts = [
        sorted({0, size, *(edge for layout in known for found in layout.ranges[dim] for edge in found)})
        for dim, size in enumerate(shape)
    ]
    free = np.ones([len(edges) - 1 for edges in cuts], bool)
    for layout in known:
        cells = [
            [c for start, stop in ranges for c in range(bisect_left(edges, start), bisect_left(edges, stop))]
            for edges, ranges in zip(cuts, layout.ranges, strict=True)
        ]
        free[np.ix_(*(np.array(found, np.int64) for found in cells))] = False
    found = np.argwhere(free)
    if not len(found):
        return None
    widths = [np.diff(edges)[found[:, dim]] for dim, edges in enumerate(cuts)]
    count = int(np.prod(widths, axis=0).sum()) if widths else 1
    first = [edges[cell] for edges, cell in zip(cuts, found[0], strict=True)]
    return count, flat_index(first, shape)


def others(count: int, what: str = "element", verbs: tuple[str, str] = ("and", "and")) -> str:
    """Return text such as `` (and 3 other elements)``; empty for a single one.

    Args:
        verbs: words before the number of one other, and of several.
    """
    return "" if count < 2 else f" ({verbs[count > 2]} {count - 1} other {what}{'s' * (count > 2)})"
