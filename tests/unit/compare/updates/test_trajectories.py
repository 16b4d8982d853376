"""A replay repeats its rollouts exactly, or the verdict names the sample and the token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from regress.compare.updates.trajectory_judge import judge_trajectories
from regress.compare.verdicts.verdict import Status, Verdict
from regress.dump.coordinates import Place
from regress.dump.record import Record
from regress.dump.trajectory import Trajectory, to_record


def trajectories() -> list[Trajectory]:
    return [
        Trajectory(
            group_id=f"g{i // 2}",
            run_id=i % 2,
            tokens=[1, 2, 3 + i, 4],
            loss_mask=[0, 0, 1, 1],
            reward=0.5 * i,
            prompt_length=2,
            log_probs=np.array([0.0, 0.0, -0.5, -1.0], np.float32),
            response=f"text {i}",
        )
        for i in range(4)
    ]


def wrong(record: Record | None) -> list[Verdict]:
    return [v for v in judge_trajectories(record, to_record(trajectories(), 3)) if not v.ok]


def test_repeated_rollouts_pass() -> None:
    found = judge_trajectories(to_record(trajectories(), 3, {"tokenizer": "x"}), to_record(trajectories(), 3))
    assert all(v.ok for v in found)
    assert {v.quantity for v in found} == {"trajectory"}
    assert {v.place for v in found} == {Place(3)}
    assert sum(v.count for v in found) > 0


def test_missing_rollouts() -> None:
    found = wrong(None)
    assert {v.status for v in found} == {Status.MISSING}
    assert found[0].detail == "the rollouts of step 3 were not recorded"


@pytest.mark.parametrize(
    ("field", "value", "name", "status", "where"),
    [
        ("tokens", [1, 2, 6, 4], "tokens", Status.MASK, "sample g1/0, position 2, token 5"),
        ("loss_mask", [0, 0, 0, 1], "loss_mask", Status.MASK, "sample g1/0, position 2, token 5"),
        ("reward", 7.0, "reward", Status.DRIFT, "sample g1/0"),
        ("prompt_length", 1, "prompt_length", Status.MASK, "sample g1/0"),
    ],
)
def test_one_changed_value(field: str, value: Any, name: str, status: Status, where: str) -> None:
    changed = trajectories()
    changed[2] = replace(changed[2], **{field: value})
    (verdict,) = wrong(to_record(changed, 3))
    assert (verdict.name, verdict.status, verdict.over) == (name, status, 1)
    assert verdict.worst is not None
    assert verdict.worst.where == where


def test_the_last_bit_of_a_sampler_log_prob() -> None:
    changed = trajectories()
    log_probs = changed[1].log_probs
    assert log_probs is not None
    log_probs.view(np.uint32)[3] += 1
    (verdict,) = wrong(to_record(changed, 3))
    assert (verdict.name, verdict.status) == ("log_probs", Status.DRIFT)
    assert verdict.worst is not None
    assert (verdict.worst.where, verdict.worst.ulp) == ("sample g0/1, position 3, token 4", 1.0)


def test_swapped_samples() -> None:
    found = wrong(to_record([trajectories()[i] for i in (1, 0, 2, 3)], 3))
    assert {v.name for v in found} == {"tokens", "reward", "run_id", "samples"}


def test_a_sample_less() -> None:
    found = wrong(to_record(trajectories()[:3], 3))
    assert {v.status for v in found} == {Status.SHAPE}
    assert found[-1].detail == "golden 4 samples, actual 3"


def test_other_texts() -> None:
    changed = trajectories()
    changed[3] = replace(changed[3], response="other", finish_reason="length")
    (verdict,) = wrong(to_record(changed, 3))
    assert (verdict.name, verdict.status) == ("samples", Status.MASK)
    assert verdict.detail == "sample 3 (g1): finish_reason, response differ"


def test_a_record_without_samples() -> None:
    record = to_record(trajectories(), 3)
    del record.meta["samples"]
    (verdict,) = wrong(record)
    assert (verdict.name, verdict.status) == ("samples", Status.MISSING)
