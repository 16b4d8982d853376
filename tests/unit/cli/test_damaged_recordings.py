"""Recordings that are damaged or sealed with wrong content stop a replay with a sentence."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from regress.dump.coordinates import Coordinates
from regress.dump.dump_reader import read
from regress.dump.formats import FORMATS
from regress.dump.record import Record
from tests.unit.cli.recordings import CUT_OFF, alone, mock, step_file


def tampered(case: Any, change: Callable[[Record], Record | None]) -> Path:
    """A whole, sealed file whose content is wrong: step 0 after ``change``."""
    path = alone(step_file(case.recording()), case)
    record = read(path)
    record = change(record) or record
    path.write_bytes(b"".join(FORMATS["safetensors"].encode(record)))
    return path


def _edit_manifest(dump: Path) -> None:
    tree = json.loads((dump / "manifest.json").read_text())
    tree["environment"]["threads"] = 2
    (dump / "manifest.json").write_text(json.dumps(tree))


def _cut_manifest(dump: Path) -> None:
    data = (dump / "manifest.json").read_bytes()
    (dump / "manifest.json").write_bytes(data[: len(data) // 2])


def _rename(dump: Path) -> None:
    step_file(dump).rename(dump / "trajectory" / "step_000007.safetensors")


def _rename_without_manifest(dump: Path) -> None:
    _rename(dump)
    (dump / "manifest.json").unlink()


def _exchange(dump: Path) -> None:
    step_file(dump, 1).write_bytes(step_file(dump).read_bytes())


DAMAGED: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "unfinished": (
        lambda dump: (dump / "manifest.json").unlink(),
        "",
        "TMP/recording has no manifest.json, so the run that wrote it was interrupted: record again, or give "
        "TMP/recording/trajectory to replay the steps it left whole",
    ),
    "manifest edited": (
        _edit_manifest,
        "",
        "TMP/recording/manifest.json is damaged (its content does not match its checksum): copy the dump again or "
        "record again",
    ),
    "manifest cut": (
        _cut_manifest,
        "trajectory",
        "TMP/recording/manifest.json is damaged (…): copy the dump again or record again",
    ),
    "a step lost": (
        lambda dump: step_file(dump, 1).unlink(),
        "",
        "TMP/recording lacks 1 record file (trajectory/step_000001.safetensors); they were deleted or not copied: "
        "copy the dump again",
    ),
    "a step renamed": (
        _rename,
        "",
        "TMP/recording lacks 1 record file (trajectory/step_000000.safetensors); they were deleted or not copied: "
        "copy the dump again",
    ),
    "a step renamed, no manifest": (
        _rename_without_manifest,
        "trajectory",
        "TMP/recording/trajectory/step_000007.safetensors holds step 0: it was renamed; give it back its name",
    ),
    "a step exchanged": (
        _exchange,
        "",
        "TMP/recording/trajectory/step_000001.safetensors has … bytes that do not match the size and hash in "
        f"manifest.json; {CUT_OFF}",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_dump(name: str, case: Any) -> None:
    damage, below, says = DAMAGED[name]
    dump = case.recording()
    damage(dump)
    case.refuses(*mock(dump / below), says=says)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("format", sorted(FORMATS))
def test_truncation(format: str, case: Any) -> None:
    path = alone(step_file(case.recording(format)), case)
    data = path.read_bytes()
    for tenth in range(10):
        path.write_bytes(data[: len(data) * tenth // 10])
        state = f"is not an intact {format} record…" if tenth else "is empty"
        case.refuses(*mock(path), "max_steps=1", says=f"TMP/alone.{format} {state}; {CUT_OFF}")
    path.write_bytes(data)
    case.trains(*mock(path), "max_steps=1")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("format", sorted(FORMATS))
def test_bit_flips(format: str, case: Any) -> None:
    path = alone(step_file(case.recording(format)), case)
    data = path.read_bytes()
    rng = random.Random(format)
    for bit in rng.sample(
        range(8 * (len(data) - 1)), 12
    ):  # the line feed at the end of jsonl carries nothing
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        case.refuses(*mock(path), "max_steps=1", says=f"TMP/alone.{format} …; …")


@pytest.mark.parametrize("zipped", [True, False])
def test_pickle_with_code(zipped: bool, case: Any) -> None:
    path = case.folder / "alone.pt"
    if zipped:
        torch.save({"step": 0, "trajectories": case.code}, path)
        clause = "its pickle holds code (posix.mkdir), which was not executed"
        remedy = "only plain values and dense tensors are read: save these with torch.save"
    else:
        path.write_bytes(pickle.dumps(case.code))
        clause, remedy = "it is a bare pickle, which may hold code and was not executed", CUT_OFF
    case.refuses(*mock(path), says=f"TMP/alone.pt is not an intact pt record: {clause}; {remedy}")
    assert not case.executed


def _empty(record: Record) -> Record:
    tensors = {name: array[:0] for name, array in record.tensors.items()}
    return Record.of("trajectory", Coordinates(0), tensors, {**record.meta, "samples": []})


def _set(name: str, index: int, value: float) -> Callable[[Record], None]:
    def change(record: Record) -> None:
        record.tensors[name][index] = value

    return change


def _without_log_probs(record: Record) -> None:
    record.tensors["has_log_probs"][:] = False
    record.tensors["log_probs"] = record.tensors["log_probs"][:0]


TAMPERED: dict[str, tuple[Callable[[Record], Record | None], tuple[str, ...], str]] = {
    "no trajectories": (
        _empty,
        (),
        "TMP/alone.safetensors cannot be used: step 0 has no trajectories, but a training step needs some: check the "
        "rollout",
    ),
    "duplicate key": (
        _set("run_id", 1, 0),
        (),
        "TMP/alone.safetensors cannot be used: step 0 has two trajectories with group_id '000000-0000' and run_id 0, "
        "but these identify a sample: number the runs of a group",
    ),
    "reward is NaN": (
        _set("reward", 2, np.nan),
        (),
        "TMP/alone.safetensors cannot be used: trajectory (group_id '000000-0001', run_id 0) has reward = nan, but "
        "rewards are finite numbers: mend the reward function",
    ),
    "trained on its prompt": (
        _set("loss_mask", 3, 1),
        (),
        "TMP/alone.safetensors cannot be used: trajectory (group_id '000000-0000', run_id 0) has loss_mask 1 in its "
        "prompt or on its first token, which no policy sampled",
    ),
    "token of another model": (
        _set("tokens", -1, 99),
        (),
        "TMP/alone.safetensors: group '000000-0001' run 1 holds token 99 but the model knows 14 tokens; give the "
        "model of the recorded run",
    ),
    "of evaluation": (
        _set("is_val", 3, True),
        (),
        "TMP/alone.safetensors: group '000000-0001' run 1 was recorded in evaluation but train mode asks for it; "
        "give the other folder",
    ),
    "without log-probs": (
        _without_log_probs,
        ("algorithm.old_log_probs=sampler",),
        "TMP/alone.safetensors: group '000000-0000' run 0 has no sampler log-probs, which algorithm.old_log_probs="
        "sampler and algorithm.sampler_correction need; set them to recompute and none, or record with regress",
    ),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_sealed_but_wrong(name: str, case: Any) -> None:
    change, overrides, says = TAMPERED[name]
    case.refuses(*mock(tampered(case, change)), "max_steps=1", *overrides, says=says)


def test_one_step_twice_in_a_file(case: Any) -> None:
    path = alone(step_file(case.recording("jsonl")), case)
    path.write_bytes(2 * path.read_bytes())
    case.refuses(
        *mock(path),
        "max_steps=1",
        says="step 0 is recorded in both TMP/alone.jsonl and TMP/alone.jsonl: keep one",
    )
