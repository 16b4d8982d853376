"""Differences that other comparators miss: one test for each of their weaknesses, and for each change one missed.

The test ids name the row (``w4``: the largest error counts, not a mean) or the change. Dumps lie on disk, and are
compared as ``regress compare`` does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regress.compare.dumps.bounds import Bounds
from regress.compare.dumps.options import Options
from regress.compare.dumps.selection import Selection
from regress.compare.dumps.session import Comparison, compare_dumps
from regress.compare.verdicts.tolerance import BITWISE
from regress.compare.verdicts.verdict import Status
from regress.dump.arrays import Array
from regress.dump.files import write_atomically
from regress.dump.formats import FORMATS
from regress.dump.manifest import Entry, Manifest, Provenance, write_manifest
from regress.dump.record import Record, replace_tensors
from regress.dump.recorded import read_trajectories
from regress.dump.trajectory import Trajectory
from regress.errors import CompareError, DumpError, GoldenError
from regress.golden.signal import require_signal
from regress.layout import BatchPlan, TokenLayout
from regress.report.comparison import report_of

PADDED, PACKED = BatchPlan(), BatchPlan("packed")
LENGTHS = (5, 9, 3, 7, 6, 8)
OBJECTIVE: dict[str, Any] = {
    "loss": "ppo_clip",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "clip_bounds": "offset",
    "delta": None,
    "dual_clip": None,
    "kl_coef": 0.0,
    "kl_placement": "loss",
    "entropy_coef": 0.0,
    "sampler_correction": "none",
    "correction_min": None,
    "correction_max": 2.0,
}

Edit = Callable[[Record], Record | None]
Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write records into a complete dump."""

    def to_folder(name: str, records: Sequence[Record], **mesh: int) -> str:
        folder, entries = tmp_path / name, {}
        for record in records:
            path = f"{record.type}/{record.where.stem}.safetensors"
            stamp = write_atomically(folder / path, FORMATS["safetensors"].encode(record))
            entries[path] = Entry(record.type, record.where, stamp)
        told = Provenance(mesh={"world_size": 1, **mesh})
        write_manifest(folder, Manifest(told, "safetensors", entries))
        return str(folder)

    return to_folder


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


@pytest.fixture
def pair(write: Write, make_world: Any) -> Callable[..., Pair]:
    """A healthy pair, to be changed."""
    return lambda lengths=LENGTHS, **how: Pair(write, make_world(lengths), **how)


def on(stage: str, name: str, change: Callable[[Array], Array]) -> Edit:
    """Change one tensor of every record of a stage."""

    def edit(record: Record) -> Record:
        if record.type != stage or name not in record.tensors:
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


def test_rows_without_a_counterpart_are_reported_on_both_sides_w1(write: Write, make_world: Any) -> None:
    world = make_world(LENGTHS)
    layouts = world.layouts(BatchPlan(micro_batch_size=1))
    golden = write("golden", [r for i in (0, 1, 2) for r in world.micro_records(layouts[i], 0, i)])
    actual = write("actual", [r for i in (1, 2, 3) for r in world.micro_records(layouts[i], 0, i)])
    found = compare_dumps(golden, actual)
    assert (found.golden_only, found.actual_only) == (["step 0, sample 000/0"], ["step 0, sample 001/1"])
    assert found.exit_code == 1
    assert {v.status for v in found.failed if v.name == "samples"} == {Status.MISSING, Status.EXTRA}


def without(stage: str, rank: int | None = None) -> Edit:
    return lambda r: None if r.type == stage and rank in (None, r.rank) else r


def less(stage: str, name: str) -> Edit:
    def edit(record: Record) -> Record:
        kept = {key: value for key, value in record.tensors.items() if record.type != stage or key != name}
        return replace(record, tensors=kept)

    return edit


def more(stage: str, name: str) -> Edit:
    def edit(record: Record) -> Record:
        return replace_tensors(record, {name: np.ones(3)}) if record.type == stage else record

    return edit


LOST: dict[str, tuple[Edit, str]] = {
    "a-stage": (without("is_loss_debug"), "is_loss_debug"),
    "missing-rank-file": (without("forward_data", 1), "forward_data"),
    "missing-rank-of-losses": (without("loss", 1), "loss"),
    "a-tensor": (less("forward_data", "entropy"), "entropy"),
    "a-parameter": (less("gradient", "model.norm.weight"), "model.norm.weight"),
    "a-tensor-too-many": (more("param", "new.weight"), "new.weight"),
    "an-unknown-tensor": (more("forward_data", "surprise"), "forward_data/surprise"),
}


@pytest.mark.parametrize(("edit", "name"), LOST.values(), ids=[f"w2-{name}" for name in LOST])
def test_what_one_side_lacks_is_a_failure(pair: Any, edit: Edit, name: str) -> None:
    found = pair(other=BatchPlan(micro_batch_size=3), ranks=2).compared(edit)
    assert found.exit_code == 1
    assert name in {verdict.name for verdict in found.failed}


def test_nothing_compared_is_no_success_w2(pair: Any, write: Write) -> None:
    with pytest.raises(CompareError, match="not one element"):
        pair().compared(only=Selection.of("no_such_quantity"))
    with pytest.raises(CompareError, match="no step in common"):
        compare_dumps(write("empty", []), write("other", []))


def test_masks_are_compared_first_and_exactly_w3(pair: Any) -> None:
    healthy = pair()
    row, column = loss_place(healthy)
    found = healthy.compared(on("forward_data", "response_mask", at((row, column), 0)))
    assert found.failed[0].status is Status.MASK
    assert found.failed[0].name == "forward_data/response_mask"


def padding_of(pair: Pair) -> tuple[int, int]:
    (layout, *_) = pair.world.layouts(pair.other)
    row, column = np.argwhere(~layout.attention_mask)[0]
    return int(row), int(column)


@pytest.mark.parametrize(
    ("junk", "status"), [(1e30, None), (np.nan, Status.NONFINITE)], ids=["w3-junk", "w3-NaN"]
)
def test_padding_is_ignored_but_for_what_is_no_number(pair: Any, junk: float, status: Status | None) -> None:
    healthy = pair()
    found = healthy.compared(on("forward_data", "log_probs", at(padding_of(healthy), junk)))
    assert [verdict.status for verdict in found.failed] == ([] if status is None else [status])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_one_token_off_by_1_in_8192_w4(write: Write, make_world: Any, dtype: str) -> None:
    lengths = [1024] * 8
    pair = Pair(write, make_world(lengths), dtype=dtype)
    row, column = loss_place(pair, 1000)
    found = pair.compared(on("forward_data", "log_probs", at((row, column), lambda x: x + 1.0)))
    (verdict,) = found.failed
    assert (verdict.over, verdict.quantity) == (1, "log_probs")
    assert verdict.worst is not None
    assert verdict.worst.where.startswith(f"sample 00{row // 2}/{row % 2}, position {column}")


def test_every_token_scaled_by_4_percent_w4(pair: Any) -> None:
    found = pair(other=PACKED).compared(on("forward_data", "log_probs", lambda array: array * 1.04))
    (verdict,) = found.failed
    assert verdict.alpha == pytest.approx(1.04)
    assert verdict.residual == pytest.approx(0, abs=1e-9)


def test_off_by_one_shift_w4(pair: Any) -> None:
    found = pair().compared(on("forward_data", "log_probs", lambda array: np.roll(array, 1, axis=1)))
    assert quantities(found) == {"log_probs"}


def test_swapped_rows_of_the_same_shape_w4(write: Write, make_world: Any) -> None:
    pair = Pair(write, make_world([6, 6, 6, 6]))
    found = pair.compared(on("forward_data", "log_probs", lambda array: array[[1, 0, 2, 3]]))
    assert quantities(found) == {"log_probs"}
    assert found.failed[0].worst is not None
    assert found.failed[0].worst.where.startswith(("sample 000/0", "sample 000/1"))


def test_not_a_number_on_both_sides_at_different_positions_w5(pair: Any) -> None:
    healthy = pair()
    first, second = loss_place(healthy, 2), loss_place(healthy, 3)
    values = healthy.world.truth["log_probs"]["log_probs"]
    offsets = healthy.world.frame.offsets
    values[offsets[first[0]] + first[1]] = np.nan
    same = healthy.compared()
    assert same.failed == []
    moved = on("forward_data", "log_probs", at(first, 0.0))
    found = healthy.compared(lambda r: on("forward_data", "log_probs", at(second, np.nan))(moved(r)))
    (verdict,) = found.failed
    assert verdict.status is Status.NONFINITE
    assert verdict.over == 2
    text = json.dumps(report_of({"compare": found}).to_json(), allow_nan=False)
    assert "NaN" in text


def test_all_zero_and_all_zero_w5(pair: Any) -> None:
    healthy = pair()
    healthy.world.truth["advantages"]["advantages"][:] = 0.0
    for stage in ("gradient", "param"):
        for array in healthy.world.truth[stage].values():
            array[:] = 0.0
    assert healthy.compared().exit_code == 0


def test_empty_tensors_w5(pair: Any) -> None:
    healthy = pair()
    healthy.world.truth["gradient"]["empty"] = np.zeros((0, 3))
    found = healthy.compared()
    assert found.exit_code == 0
    assert any(v.name == "empty" and v.ok for v in found.verdicts)
    assert (
        healthy.compared(on("gradient", "empty", lambda _: np.zeros((0, 4)))).failed[0].status is Status.SHAPE
    )


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_one_ulp_in_bitwise_mode_w6(pair: Any, dtype: str) -> None:
    healthy = pair(other=PACKED, dtype=dtype)
    strict = Bounds(BITWISE)
    assert [v for v in healthy.compared(bounds=strict).failed if v.quantity != "loss"] == []
    nudged = on("param", "model.norm.weight", at(1, lambda x: np.nextafter(x, np.inf, dtype=x.dtype)))
    assert healthy.compared(nudged).failed == []
    found = [v for v in healthy.compared(nudged, bounds=strict).failed if v.quantity != "loss"]
    (verdict,) = found
    assert (verdict.over, verdict.max_ulp, verdict.name) == (1, 1.0, "model.norm.weight")


def test_other_dtypes_in_bitwise_mode_w6(pair: Any) -> None:
    wide = on("param", "model.norm.weight", lambda array: array.astype(np.float32))
    found = pair().compared(wide, bounds=Bounds(BITWISE))
    assert [(v.status, v.name) for v in found.failed] == [(Status.DTYPE, "model.norm.weight")]


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


def test_gradients_by_name_and_element_w8(pair: Any) -> None:
    found = pair().compared(on("gradient", "model.embed_tokens.weight", at((3, 1), lambda x: x * 1.001)))
    (verdict,) = found.failed
    assert (verdict.name, verdict.over) == ("model.embed_tokens.weight", 1)
    assert verdict.worst is not None
    assert verdict.worst.where == "element [3, 1] of model.embed_tokens.weight"


def sharded(records: Sequence[Record], edit: Edit = lambda record: record) -> list[Record]:
    """Full tensors cut over two ranks along their first dimension."""
    found = []
    for record in records:
        if record.micro is not None:
            found.append(record)
            continue
        for rank in (0, 1):
            tensors, shards = {}, {}
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


def test_a_replay_of_rollouts_that_are_not_there_w9(tmp_path: Path) -> None:
    with pytest.raises(DumpError, match="does not exist"):
        read_trajectories(tmp_path / "step_000000.pt")


def test_damage_is_no_difference_w10(pair: Any, tmp_path: Path) -> None:
    pair().compared()
    path = tmp_path / "actual" / "param" / "step_000000_rank0.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 64
    path.write_bytes(bytes(data))
    with pytest.raises(DumpError, match="do not match the size and hash"):
        compare_dumps(str(tmp_path / "golden"), str(tmp_path / "actual"))


def test_a_dump_that_was_interrupted_w11(pair: Any, tmp_path: Path) -> None:
    pair().compared()
    (tmp_path / "actual" / "manifest.json").unlink()
    with pytest.raises(DumpError, match="is no complete dump"):
        compare_dumps(str(tmp_path / "golden"), str(tmp_path / "actual"))


def test_what_broke_first_comes_first_w12(pair: Any) -> None:
    def edit(record: Record) -> Record:
        for stage, name in (
            ("gradient", "model.norm.weight"),
            ("loss", "loss"),
            ("forward_data", "log_probs"),
        ):
            record = on(stage, name, lambda array: array * 1.5)(record)
        return record

    found = pair().compared(edit)
    assert [v.quantity for v in found.failed] == ["log_probs", "loss", "gradient", "invariants"]


def test_a_golden_without_signal_is_refused_w13(make_world: Any) -> None:
    world = make_world([4, 4])
    rollouts = [Trajectory(*key, [1, 2, 3, 4], [0, 0, 1, 1], 1.0, 2) for key in world.frame.samples]
    with pytest.raises(GoldenError, match="some faults could not show"):
        require_signal(
            "flat",
            frames={"step_000000": world.frame},
            truth={"step_000000": world.truth},
            trajectories={0: rollouts},
            config={"algorithm": OBJECTIVE},
        )


def test_negative_divergence(pair: Any) -> None:
    found = pair().compared(on("is_loss_debug", "kl", lambda array: -np.abs(array) - 1e-6))
    assert "kl" in quantities(found)


def test_microbatches_without_a_loss_token_w5(pair: Any) -> None:
    found = pair((1, 1, 5, 4), other=BatchPlan(micro_batch_size=2)).compared()
    assert (found.failed, found.problems, found.exit_code) == ([], [], 0)
