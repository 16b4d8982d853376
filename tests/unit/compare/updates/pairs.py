"""Pairs of dumps of one update on disk, of which the second is changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from regress.compare.dumps.comparison import Comparison, compare_dumps
from regress.compare.dumps.comparison_options import Options
from regress.dump.numpy_arrays import Array
from regress.dump.record import Record, replace_tensors
from regress.layout import BatchPlan

PADDED, PACKED = BatchPlan(), BatchPlan("packed")
LENGTHS = (5, 9, 3, 7, 6, 8)
Edit = Callable[[Record], Record | None]
Write = Callable[..., str]


@dataclass
class Pair:
    """Two dumps of one update, the second changed."""

    write: Write
    world: Any
    plan: BatchPlan = PADDED
    other: BatchPlan = PADDED
    ranks: int = 1
    dtype: str = "float64"

    def compared(self, edit: Edit = lambda record: record, **options: Any) -> Comparison:
        golden = self.write("golden", self.world.records(self.plan, 1, self.dtype))
        records = [
            found for r in self.world.records(self.other, self.ranks, self.dtype) if (found := edit(r))
        ]
        return compare_dumps(golden, self.write("actual", records), Options(**options))


def on(record_type: str, name: str, change: Callable[[Array], Array]) -> Callable[[Record], Record]:
    """Change one tensor of every record of a stage."""

    def edit(record: Record) -> Record:
        if record.type != record_type or name not in record.tensors:
            return record
        return replace_tensors(record, {name: np.array(change(record.tensors[name].copy()), order="C")})

    return edit


def at(index: Any, value: Any) -> Callable[[Array], Array]:
    """Set elements."""

    def change(array: Array) -> Array:
        array[index] = value(array[index]) if callable(value) else value
        return array

    return change


def quantities(found: Comparison) -> set[str]:
    return {verdict.quantity for verdict in found.failed}


def loss_place(pair: Pair, nth: int = 2) -> tuple[int, int]:
    """Row and column of a loss token of the first microbatch."""
    (layout, *_) = pair.world.layouts(pair.other)
    mask = layout.scatter(pair.world.loss_mask, pair.world.frame.offsets)
    row, column = np.argwhere(mask)[nth]
    return int(row), int(column)


def without(record_type: str, rank: int | None = None) -> Edit:
    return lambda r: None if r.type == record_type and rank in (None, r.rank) else r
