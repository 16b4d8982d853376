"""Rules that trajectories obey, and NexRL's own files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regress.dump.coordinates import Coordinates
from regress.dump.dump_reader import read
from regress.dump.file_damage import Damage
from regress.dump.nexrl_trajectories import as_dict, foreign_trajectories
from regress.dump.record import Record
from regress.dump.token_provenance import take_versions
from regress.dump.trajectory import Trajectory, from_record, to_record
from regress.errors import DumpError


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"tokens": []}, "needs tokens"),
        ({"tokens": [1, 2, 3, -1]}, "needs tokens that are non-negative"),
        ({"tokens": [1, 2, 3, 4.0]}, "needs tokens"),
        ({"tokens": [1, 2, 3, True]}, "needs tokens"),
        ({"loss_mask": [0, 0, 1]}, "has 4 tokens but 3 values in loss_mask"),
        ({"loss_mask": [0, 0, 1, 2]}, "values other than 0 and 1 in loss_mask"),
        ({"loss_mask": [0, 1, 1, 1]}, "loss_mask 1 in its prompt"),
        ({"prompt_length": 0, "loss_mask": [1, 0, 0, 0]}, "on its first token"),
        ({"prompt_length": 5}, "has prompt_length 5, which does not lie within its 4 tokens"),
        ({"reward": math.nan}, "has reward = nan, but rewards are finite numbers: mend the reward function"),
        ({"reward": math.inf}, "has reward = inf"),
        ({"reward": None}, "has reward = None"),
        ({"rewards": {"length": math.nan}}, "has length = nan"),
        ({"log_probs": np.zeros(3)}, r"has 4 tokens but log_probs of shape \(3,\)"),
        ({"log_probs": np.zeros(4, np.int64)}, "log_probs that are not floating-point array"),
        ({"log_probs": [0.0] * 4}, "log_probs that are not floating-point array"),
        ({"weight_versions": [3]}, "has 4 tokens but 1 weight_versions: give each token one"),
        ({"group_id": 7}, "needs a string as group_id"),
        ({"run_id": "0"}, "an integer as run_id"),
    ],
)
def test_broken_rules_name_the_sample(make_trajectory: Any, changes: dict[str, Any], rule: str) -> None:
    with pytest.raises(DumpError, match=rule) as caught:
        to_record([make_trajectory(0), make_trajectory(1, **changes)], 0)
    group, run = changes.get("group_id", "g0"), changes.get("run_id", 1)
    assert f"trajectory (group_id {group!r}, run_id {run!r})" in str(caught.value)


def test_broken_batches(make_trajectory: Any) -> None:
    with pytest.raises(DumpError, match="step 4 has no trajectories"):
        to_record([], 4)
    with pytest.raises(DumpError, match="step 4 has two trajectories with group_id 'g0' and run_id 1"):
        to_record([make_trajectory(1), make_trajectory(1)], 4)
    mixed = [make_trajectory(0), make_trajectory(1, log_probs=np.zeros(4))]
    with pytest.raises(DumpError, match=r"log_probs of several types \(float32, float64\)"):
        to_record(mixed, 4)


def test_same_run_in_another_group_is_another_sample(make_trajectory: Any) -> None:
    record = to_record([make_trajectory(0), make_trajectory(0, group_id="g1")], 0)
    assert [t.key for t in from_record(record)] == [("g0", 0), ("g1", 0)]


def test_log_probs_of_some(make_trajectory: Any) -> None:
    values = np.array([0, 0, -1.5, -0.25], ml_dtypes.bfloat16)
    batch = [make_trajectory(0, log_probs=None), make_trajectory(1, log_probs=values, tokens=[1, 2, 3, 4])]
    first, second = from_record(to_record(batch, 0))
    assert first.log_probs is None
    assert second.log_probs is not None
    assert (second.log_probs.dtype, second.log_probs.tolist()) == (values.dtype, values.tolist())


@given(st.lists(st.one_of(st.none(), st.integers(0, 3), st.sampled_from(["a", "b"])), min_size=4, max_size=4))
def test_versions_of_tokens_survive(versions: list[Any]) -> None:
    sample = {"tokens": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1], "reward": 0.0, "prompt_length": 2}
    given = [Trajectory("g", 0, **sample, weight_versions=versions), Trajectory("g", 1, **sample)]  # type: ignore[arg-type]  # as they are
    told, untold = from_record(to_record(given, 0))
    assert told.weight_versions == versions
    assert (told.route_versions, untold.weight_versions) == (None, None)
    assert "weight_versions" not in to_record(given[1:], 0).meta["samples"][0]  # type: ignore[index,operator]  # a list of dicts
    again = from_record(foreign_trajectories({"trajectories": [as_dict(told)]}, 0))
    assert again[0].weight_versions == versions


@pytest.mark.parametrize(
    ("told", "found"),
    [
        (7, [None, None, 7, None]),
        (["a"], [None, None, "a", None]),
        ([5, 6], [None, None, 5, 6]),
        ([1, 2, 3, 4], [1, 2, 3, 4]),
    ],
)
def test_versions_are_of_the_sample_its_completion_or_all_tokens(told: Any, found: list[Any]) -> None:
    fields = {"policy_version": told, "uid": "u"}
    assert take_versions(fields, [0, 0, 1, 0], 2) == {"weight_versions": found}
    assert fields == {"uid": "u"}


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        (
            {"route_version": [1, 2, 3]},
            "its route_version are 3 for 4 tokens, 2 of the completion and 1 in the loss",
        ),
        ({"weight_version": 1.5}, "its weight_version are not texts or whole numbers"),
        ({"weight_version": 1, "policy_version": 1}, "which are one thing"),
    ],
)
def test_versions_that_fit_no_tokens_are_refused(fields: dict[str, Any], rule: str) -> None:
    with pytest.raises(Damage, match=rule):
        take_versions(fields, [0, 0, 1, 0], 2)


def test_other_records_hold_no_trajectories() -> None:
    record = Record.of("loss", Coordinates(2), {"loss": 1.0})
    with pytest.raises(DumpError, match="the loss record of step 2 holds no trajectories"):
        from_record(record)


OLD = {
    "tokens": [11, 12, 13, 14],
    "loss_mask": [0, 0, 1, 1],
    "reward": 1.0,
    "is_val": False,
    "extra_fields": {
        "group_id": "g",
        "uid": "u",
        "run_id": 2,
        "task_id": 5,
        "score": 1.0,
        "temperature": 0.9,
        "logprobs": [0.0, 0.0, -0.1, -0.2],
        "prompt": "p",
        "response": "r",
        "ground_truth": "t",
        "finish_reason": "length",
        "advantage": 0.5,
    },
}
NEW = {**OLD, "extra_fields": dict(list(OLD["extra_fields"].items())[:6])}  # type: ignore[attr-defined]


def _nexrl(path: Path, payload: dict[str, Any]) -> Path:
    if path.suffix == ".pt":
        torch.save(payload, path)
    else:
        path.write_text(json.dumps(payload) + "\n")
    return path


@pytest.mark.parametrize("suffix", ["pt", "jsonl"])
@pytest.mark.parametrize("generation", [OLD, NEW])
def test_both_generations_of_nexrl(tmp_path: Path, suffix: str, generation: dict[str, Any]) -> None:
    payload = {"step": 3, "num_trajectories": 1, "trajectories": [generation]}
    record = read(_nexrl(tmp_path / f"step_000003.{suffix}", payload))
    assert (record.type, record.step) == ("trajectory", 3)
    (trajectory,) = from_record(record)
    assert trajectory.key == ("g", 2)
    assert (trajectory.tokens, trajectory.loss_mask) == ([11, 12, 13, 14], [0, 0, 1, 1])
    assert (trajectory.prompt_length, trajectory.temperature, trajectory.task_id) == (2, 0.9, 5)
    assert trajectory.extra["uid"] == "u"
    if generation is OLD:
        assert trajectory.log_probs is not None
        assert trajectory.log_probs.tolist() == [0.0, 0.0, -0.1, -0.2]
        assert (trajectory.response, trajectory.finish_reason) == ("r", "length")
        assert trajectory.extra["advantage"] == 0.5
    else:
        assert trajectory.log_probs is None
        assert trajectory.response is None


def test_group_is_the_uid_where_it_is_missing(tmp_path: Path) -> None:
    item = {**NEW, "extra_fields": {"uid": 17, "run_id": 0}}
    (trajectory,) = from_record(read(_nexrl(tmp_path / "a.pt", {"step": 0, "trajectories": [item]})))
    assert trajectory.key == ("17", 0)


@pytest.mark.parametrize("suffix", ["pt", "jsonl"])
@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        ({"trajectories": [{**NEW, "extra_fields": {}}]}, "number 0 lacks group_id .or uid. and run_id"),
        ({"trajectories": [NEW, {"tokens": [1]}]}, "number 1 lacks loss_mask, reward, group_id"),
        ({"trajectories": [{**NEW, "reward": math.nan}]}, "reward = nan"),
        ({"trajectories": [NEW, NEW]}, "two trajectories with group_id 'g' and run_id 2"),
        ({"trajectories": []}, "step 3 has no trajectories"),
        ({"trajectories": [NEW], "num_trajectories": 2}, "announces 2 trajectories but holds 1"),
        ({"trajectories": [NEW], "surprise": 1}, "is not a record"),
        ({"trajectories": "abc"}, "not a list of dicts"),
        ({"trajectories": [{**NEW, "tokens": 5}]}, "'int' object is not iterable"),
    ],
)
def test_malformed_nexrl_files(tmp_path: Path, suffix: str, payload: dict[str, Any], reason: str) -> None:
    path = _nexrl(tmp_path / f"a.{suffix}", {"step": 3, **payload})
    with pytest.raises(DumpError, match=reason) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_other_nexrl_tables(tmp_path: Path) -> None:
    forward = {"step": 1, "rank": 2, "micro_idx": 3, "log_probs": torch.zeros(2, 3).bfloat16()}
    forward |= {
        "entropy": torch.ones(2, 3),
        "log_probs_shape": [2, 3],
        "input_ids": torch.ones(2, 4, dtype=torch.int64),
    }
    record = read(_nexrl(tmp_path / "f.pt", forward))
    assert (record.type, record.where) == ("forward_data", Coordinates(1, rank=2, micro=3))
    assert record.tensors["log_probs"].dtype == ml_dtypes.bfloat16
    assert record.meta == {"log_probs_shape": [2, 3]}

    loss = {
        "step": 1,
        "rank": 0,
        "micro_idx": 0,
        "loss": 0.1,
        "pg_loss": 0.2,
        "entropy_loss": 0.3,
        "metrics": {"a": 1.0},
    }
    record = read(_nexrl(tmp_path / "l.jsonl", loss))
    assert {name: value.item() for name, value in record.tensors.items()} == {
        "loss": 0.1,
        "pg_loss": 0.2,
        "entropy_loss": 0.3,
    }
    assert record.meta == {"metrics": {"a": 1.0}}

    param = {
        "step": 1,
        "rank": 0,
        "param_name": "w",
        "param": torch.ones(2),
        "shape": [2],
        "dtype": "torch.float32",
    }
    record = read(_nexrl(tmp_path / "p.pt", param))
    assert (record.type, list(record.tensors)) == ("param", ["w"])
