"""Rollouts are compared where they lie in their records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_dumps import Entry, finish

from regress.compare.dumps.comparison import Comparison, compare_dumps
from regress.compare.verdicts.verdict import Status
from regress.dump.coordinates import Coordinates
from regress.dump.dump_files import write_atomically
from regress.dump.formats import FORMATS
from regress.dump.record import Record
from regress.dump.trajectory import Trajectory, from_record, rollouts_in, to_record
from regress.errors import DumpError


def sampled(**changed: Any) -> list[Trajectory]:
    """Three samples, the second of them without log-probs, and changes to the last."""
    rng, found = np.random.default_rng(0), []
    for run, size in enumerate((5, 7, 6)):
        told: dict[str, Any] = {
            "tokens": rng.integers(1, 90, size).tolist(),
            "loss_mask": [0, 0] + [1] * (size - 2),
            "log_probs": None if run == 1 else -rng.random(size, np.float32),
        }
        found.append(
            Trajectory("g", run, reward=run / 2, prompt_length=2, **{**told, **(changed if run == 2 else {})})
        )
    return found


def written(folder: Path, trajectories: list[Trajectory]) -> str:
    record = to_record(trajectories, 0)
    name = "trajectory/step_000000.safetensors"
    stamp = write_atomically(folder / name, FORMATS["safetensors"].encode(record))
    finish(folder, {name: Entry("trajectory", Coordinates(0), stamp)}, 1)
    return str(folder)


def compared(tmp_path: Path, actual: list[Trajectory]) -> Comparison:
    return compare_dumps(written(tmp_path / "golden", sampled()), written(tmp_path / "actual", actual))


def test_parts_of_a_record_are_its_trajectories() -> None:
    record = to_record(sampled(), 3)
    for part, whole in zip(rollouts_in(record), from_record(record), strict=True):
        assert (part.key, part.reward, part.is_val) == (whole.key, whole.reward, whole.is_val)
        assert (part.tokens.tolist(), part.loss_mask.tolist()) == (whole.tokens, whole.loss_mask)
        assert part.tokens.base is not None
        assert (part.log_probs is None) == (whole.log_probs is None)
        if part.log_probs is not None:
            np.testing.assert_array_equal(part.log_probs, whole.log_probs)


def test_any_order_is_equal(tmp_path: Path) -> None:
    found = compared(tmp_path, sampled()[::-1])
    assert (found.exit_code, found.compared) == (0, 18 + 18 + 3 + 3 + 9 - 2)


def test_another_length_is_said(tmp_path: Path) -> None:
    last = sampled()[2]
    assert last.log_probs is not None
    changed = {"tokens": last.tokens[:-1], "loss_mask": last.loss_mask[:-1], "log_probs": last.log_probs[:-1]}
    found = compared(tmp_path, sampled(**changed))
    (verdict,) = [verdict for verdict in found.failed if verdict.status is Status.SHAPE]
    assert verdict.detail == "sample g/2 has 6 golden tokens and 5 actual ones"


def test_one_log_prob_is_found(tmp_path: Path) -> None:
    log_probs = sampled()[2].log_probs
    assert log_probs is not None
    log_probs[4] -= 1e-3
    (verdict,) = compared(tmp_path, sampled(log_probs=log_probs)).failed
    assert verdict.worst is not None
    assert verdict.worst.where.startswith("sample g/2, position 4")


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("tokens", np.zeros(17, np.int64), "tokens has 17 values for 18 tokens"),
        ("log_probs", np.zeros(3, np.float32), "log_probs has 3 values for 11 tokens"),
        ("run_id", np.zeros(3, np.int64), "two trajectories with group_id 'g' and run_id 0"),
    ],
)
def test_what_holds_no_rollouts_is_refused(name: str, values: Any, message: str) -> None:
    record = to_record(sampled(), 0)
    broken = Record("trajectory", 0, {**record.tensors, name: values}, record.meta)
    with pytest.raises(DumpError, match=message):
        rollouts_in(broken)
