"""Layouts in which other comparators lose values: samples are matched, losses add up and shards are put together.

The test ids name the weakness, as in `test_adversarial_values.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from regress.compare.dumps.comparison import compare_dumps
from regress.dump.numpy_arrays import Array
from regress.dump.record import Record
from regress.layout import BatchPlan, TokenLayout
from tests.unit.compare.updates.pairs import LENGTHS, PACKED, PADDED, Edit, Write, at, on, quantities, without

LAYOUTS = {
    "packed": {"other": PACKED},
    "left": {"other": BatchPlan(padding_side="left")},
    "microbatches": {"other": BatchPlan(micro_batch_size=2), "ranks": 2},
    "packed-back": {"plan": PACKED, "other": BatchPlan(micro_batch_size=1), "ranks": 3},
}


@pytest.mark.parametrize("how", LAYOUTS.values(), ids=[f"w1-{name}" for name in LAYOUTS])
def test_samples_are_matched_whatever_the_layout(pair: Any, how: dict[str, Any]) -> None:
    found = pair(**how).compared()
    assert (found.failed, found.problems, found.exit_code) == ([], [], 0)


def test_losses_of_another_split_add_up_w7(pair: Any) -> None:
    healthy = pair(other=BatchPlan(micro_batch_size=2), ranks=3)
    assert healthy.compared().exit_code == 0
    doubled = healthy.compared(on("loss", "loss", lambda array: array * 2.0))
    assert quantities(doubled) == {"loss", "invariants"}, "nor is it the sum of its terms"
    assert doubled.failed[0].alpha == pytest.approx(2.0)


def halves(layout: TokenLayout) -> list[TokenLayout]:
    """The two ranks of a sequence split in zigzag: blocks 0 and 3 of 4, and blocks 1 and 2."""
    size = -(-layout.shape[1] // 4)
    parts = []
    for blocks in ((0, 3), (1, 2)):
        segments = []
        for s in layout.segments:
            for place, block in enumerate(blocks):
                left, right = max(s.col, block * size), min(s.col + s.stop - s.start, (block + 1) * size)
                if left < right:
                    start = s.start + left - s.col
                    col = place * size + left - block * size
                    segments.append(s._replace(start=start, stop=start + right - left, col=col))
        parts.append(TokenLayout((layout.shape[0], 2 * size), tuple(segments)))
    return parts


def zigzag(world: Any, edit: Edit = lambda record: record) -> list[Record]:
    """Return the records of two ranks that share packed sequences."""
    (layout,) = world.layouts(PACKED)
    found = [r for rank, part in enumerate(halves(layout)) for r in world.micro_records(part, rank, 0)]
    whole = [r for r in world.records(PADDED) if r.micro is None]
    ranks = [*whole, *(replace(r, rank=1) for r in whole)]
    return [kept for r in (*found, *ranks) if (kept := edit(r)) is not None]


def test_zigzag_split_of_packed_sequences_cp(write: Write, make_world: Any) -> None:
    world = make_world(LENGTHS)
    golden = write("golden", world.records(PADDED))
    found = compare_dumps(golden, write("actual", zigzag(world), world_size=2, cp=2))
    assert (found.failed, found.exit_code) == ([], 0)
    moved = on("activations", "model.layers.0", at((0, 1, 0), lambda x: x + 1e-6))
    wrong = compare_dumps(golden, write("moved", zigzag(world, moved), world_size=2, cp=2))
    assert quantities(wrong) == {"activations"}
    assert wrong.failed[0].place.rank == 0


def test_loss_halved_by_context_parallelism_w7(write: Write, make_world: Any) -> None:
    world = make_world(LENGTHS)
    halved = on("loss", "loss", lambda array: array * 0.5)
    golden = write("golden", world.records(PADDED))
    found = compare_dumps(golden, write("actual", zigzag(world, halved), world_size=2, cp=2))
    assert quantities(found) == {"loss", "invariants"}, "nor is it the sum of its terms"
    assert found.failed[0].alpha == pytest.approx(0.5)


def sharded(records: Sequence[Record], edit: Edit = lambda record: record) -> list[Record]:
    """Full tensors cut over two ranks along their first dimension."""
    found = []
    for record in records:
        if record.micro is not None:
            found.append(record)
            continue
        for rank in (0, 1):
            tensors: dict[str, Array] = {}
            shards: dict[str, Any] = {}
            for name, array in record.tensors.items():
                if not array.ndim:
                    tensors[name] = array
                    continue
                cut = array.shape[0] // 2
                start, stop = (0, cut) if rank == 0 else (cut, array.shape[0])
                tensors[name] = np.ascontiguousarray(array[start:stop])
                rest = [[[0, size]] for size in array.shape[1:]]
                shards[name] = {"shape": list(array.shape), "ranges": [[[start, stop]], *rest]}
            found.append(replace(record, rank=rank, tensors=tensors, meta={**record.meta, "shards": shards}))
    return [kept for record in found if (kept := edit(record)) is not None]


def test_shards_of_full_tensors_w8(write: Write, make_world: Any) -> None:
    world = make_world(LENGTHS)
    golden = write("golden", world.records(PADDED))
    assert compare_dumps(golden, write("actual", sharded(world.records(PADDED)))).exit_code == 0
    assert compare_dumps(write("cut", sharded(world.records(PADDED))), golden).exit_code == 0
    lost = write("lost", sharded(world.records(PADDED), without("param", 1)))
    found = compare_dumps(golden, lost)
    assert found.exit_code == 1
    assert any("is held by no rank" in v.detail for v in found.failed)


def test_microbatches_without_a_loss_token_w5(pair: Any) -> None:
    found = pair((1, 1, 5, 4), other=BatchPlan(micro_batch_size=2)).compared()
    assert (found.failed, found.problems, found.exit_code) == ([], [], 0)
