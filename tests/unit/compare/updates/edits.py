"""Lengths and layouts of the update that is broken, changes of its records, and places of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from regress.dump.record import Record
from regress.layout import BatchPlan

LENGTHS = (5, 2, 6, 3, 4)
PADDED = BatchPlan(micro_batch_size=2)
PACKED = BatchPlan(layout="packed", micro_batch_size=2)


def changed(
    records: Sequence[Record], record_type: str, micro: int | None, change: Callable[[dict[str, Any]], None]
) -> list[Record]:
    """The records with the tensors of one of them changed in place, on a copy."""
    result = []
    for record in records:
        if (record.type, record.micro) == (record_type, micro):
            tensors = {name: array.copy() for name, array in record.tensors.items()}
            change(tensors)
            record = Record(record.type, 0, tensors, record.meta, rank=record.rank, micro=record.micro)
        result.append(record)
    return result


def place_of(world: Any, plan: BatchPlan, sample: int, position: int) -> tuple[int, int, int]:
    """Microbatch, row and column of a token."""
    for micro, layout in enumerate(world.layouts(plan)):
        for s in layout.segments:
            if s.sample == sample:
                return micro, s.row, s.col + position
    raise AssertionError


def needed(world: Any, record_type: str, *samples: int) -> int:
    """Tokens of some samples that the records of a stage must have: values of the loss belong to loss tokens."""
    if record_type in ("batch_inputs", "activations"):
        return sum(world.frame.lengths[i] for i in samples)
    offsets = world.frame.offsets
    return sum(int(world.loss_mask[offsets[i] : offsets[i + 1]].sum()) for i in samples)


def last_loss_token(world: Any, sample: int) -> int:
    return int(world.frame.lengths[sample]) - 1
