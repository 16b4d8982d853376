"""Dumps that lack something are a failure or refused, never a success as for other comparators.

The test ids name the weakness, as in `test_adversarial_values.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regress.compare.dumps.comparison import compare_dumps
from regress.compare.dumps.tensor_selection import Selection
from regress.compare.verdicts.verdict import Status
from regress.dump.record import Record, replace_tensors
from regress.dump.recorded_trajectories import read_trajectories
from regress.dump.trajectory import Trajectory
from regress.errors import CompareError, DumpError, GoldenError
from regress.layout import BatchPlan
from regress.replay.case_signal import require_signal
from tests.unit.compare.updates.pairs import LENGTHS, Edit, Write, without

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


def test_rows_without_a_counterpart_are_reported_on_both_sides_w1(write: Write, make_world: Any) -> None:
    world = make_world(LENGTHS)
    layouts = world.layouts(BatchPlan(micro_batch_size=1))
    golden = write("golden", [r for i in (0, 1, 2) for r in world.micro_records(layouts[i], 0, i)])
    actual = write("actual", [r for i in (1, 2, 3) for r in world.micro_records(layouts[i], 0, i)])
    found = compare_dumps(golden, actual)
    assert (found.golden_only, found.actual_only) == (["step 0, sample 000/0"], ["step 0, sample 001/1"])
    assert found.exit_code == 1
    assert {v.status for v in found.failed if v.name == "samples"} == {Status.MISSING, Status.EXTRA}


def less(record_type: str, name: str) -> Edit:
    def edit(record: Record) -> Record:
        kept = {
            key: value for key, value in record.tensors.items() if record.type != record_type or key != name
        }
        return replace(record, tensors=kept)

    return edit


def more(record_type: str, name: str) -> Edit:
    def edit(record: Record) -> Record:
        return replace_tensors(record, {name: np.ones(3)}) if record.type == record_type else record

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
    with pytest.raises(DumpError, match="is not a complete dump"):
        compare_dumps(str(tmp_path / "golden"), str(tmp_path / "actual"))


def test_a_golden_without_signal_is_refused_w13(make_world: Any) -> None:
    world = make_world([4, 4])
    rollouts = [
        Trajectory(group, number, [1, 2, 3, 4], [0, 0, 1, 1], 1.0, 2) for group, number in world.frame.samples
    ]
    with pytest.raises(GoldenError, match="some faults could not show"):
        require_signal(
            "flat",
            frames={"step_000000": world.frame},
            truth={"step_000000": world.truth},
            trajectories={0: rollouts},
            config={"algorithm": OBJECTIVE},
            formulas={},
        )
