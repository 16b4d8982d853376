"""Recordings that do not fit the run, or are damaged, stop a replay with a sentence; nothing is ever invented."""

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
from regress.dump.formats import FORMATS
from regress.dump.reader import read
from regress.dump.record import Record
from regress.dump.recorded import read_trajectories

AS_RECORDED = "as in the recorded run"
CUT_OFF = "it was cut off or changed after it was written: copy it again or record again"


def mock(path: object) -> tuple[str, ...]:
    return (
        "rollout_worker.type=mock",
        "rollout_worker.need_llm_inference=false",
        f"rollout_worker.trajectory_load_path={path}",
    )


def rolled(folder: Path) -> tuple[str, ...]:
    return ("rollout_mock.enable=true", "rollout_mock.mode=mock", f"rollout_mock.dump_dir={folder}")


def step_file(dump: Path, step: int = 0) -> Path:
    (path,) = dump.glob(f"trajectory/step_{step:06d}.*")
    return path


def alone(path: Path, case: Any) -> Path:
    """A step file without the manifest that would guard it."""
    return path.rename(case.folder / f"alone{path.suffix}")


def tampered(case: Any, change: Callable[[Record], Record | None]) -> Path:
    """A whole, sealed file whose content is wrong: step 0 after ``change``."""
    path = alone(step_file(case.recording()), case)
    record = read(path)
    record = change(record) or record
    path.write_bytes(b"".join(FORMATS["safetensors"].encode(record)))
    return path


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_a_sound_recording_replays(format: str, case: Any) -> None:
    dump = case.recording(format)
    case.trains(*mock(dump))
    case.trains(*mock(dump / "trajectory"), f"rollout_worker.trajectory_format={format}")
    case.trains(*mock(step_file(dump)), "max_steps=1")
    case.trains(*mock(alone(step_file(dump), case)), "max_steps=1")


def test_sound_rollouts_replay(case: Any) -> None:
    rollouts = case.rollouts()
    case.trains(*rolled(rollouts), "evaluation.every_n_steps=1")
    temperatures = {
        split: {
            t.temperature for step in read_trajectories(rollouts / split).values() for t in step.trajectories
        }
        for split in ("train", "val")
    }
    assert temperatures == {"train": {1.0}, "val": {None}}, "evaluation is greedy, whatever the temperature"


ASKED: dict[str, tuple[tuple[str, ...], str]] = {
    "more steps than recorded": (
        ("max_steps=3",),
        "[Rollout Mock] TMP/recording holds no recording of train step 2 (it holds the steps 0-1); record that step "
        "first, lower max_steps, or check the path and that the recording was made in train mode",
    ),
    "other seed": (
        ("seed=1",),
        f"TMP/…0.safetensors: group '000000-0000' run 0 was recorded for another prompt than '…'; set task, seed and "
        f"tokenizer {AS_RECORDED}",
    ),
    "other task": (
        ("task.name=sort",),
        "TMP/…0.safetensors: recorded with tokenizer … but this run uses …; give the recorded run's tokenizer.path "
        "or task",
    ),
    "other temperature": (
        ("rollout_worker.temperature=0.7",),
        "TMP/…0.safetensors: group '000000-0000' run 0 was sampled at temperature 1.0 but rollout_worker.temperature "
        f"is 0.7; set it {AS_RECORDED}",
    ),
    "larger groups": (
        ("data.group_size=3",),
        "TMP/…0.safetensors: group '000000-0000' run 2 is asked for but was not recorded; set data.prompts_per_step, "
        f"data.group_size, max_steps and seed {AS_RECORDED}, or task.name=null to take the prompts from the recording",
    ),
    "smaller groups": (
        ("data.group_size=1", "algorithm.single_sample=raw"),
        "TMP/…0.safetensors: 2 of 4 recorded trajectories are not asked for, such as group '000000-0000' run 1; set "
        f"data.prompts_per_step, data.group_size and seed {AS_RECORDED}",
    ),
    "fewer groups": (
        ("data.prompts_per_step=1",),
        "TMP/…0.safetensors: 2 of 4 recorded trajectories are not asked for, such as group '000000-0001' run 0; set "
        f"data.prompts_per_step, data.group_size and seed {AS_RECORDED}",
    ),
    "shorter completions": (
        ("data.max_completion_length=1",),
        "data.max_completion_length=1: every answer of the task takes more tokens, from 4 to 6 with its end; set "
        "data.max_completion_length=6",
    ),
    "other format": (
        ("rollout_worker.trajectory_format=pt",),
        "TMP/recording is a safetensors dump, not pt: set the format to safetensors or auto",
    ),
    "other variables": (
        ("system_envs.NCCL_ALGO=Ring",),
        "TMP/…0.safetensors: recorded with NCCL_ALGO=None but it is 'Ring' now, which may change arithmetic; set it "
        "as it was, or rollout_worker.allow_environment_mismatch=true to replay all the same",
    ),
    "variables of one's own": (
        ("system_envs.MY_KERNELS=fast",),
        "TMP/…0.safetensors: recorded with MY_KERNELS=None but it is 'fast' now, which may change arithmetic; set it "
        "as it was, or rollout_worker.allow_environment_mismatch=true to replay all the same",
    ),
    "other threads": (
        ("threads=2",),
        "TMP/…0.safetensors: recorded with threads=1 but it is 2 now, which may change arithmetic; set it as it was, "
        "or rollout_worker.allow_environment_mismatch=true to replay all the same",
    ),
    "evaluation": (
        ("evaluation.every_n_steps=1",),
        "rollout_worker.type=mock holds no evaluation and evaluation.every_n_steps=1 asks for it; set "
        "evaluation.every_n_steps=0, record and replay both with rollout_mock, or sample the evaluations alone with "
        "rollout_worker.need_llm_inference=true.",
    ),
    "an earlier dump in the way": (
        ("debug.enable_data_dump=true", "debug.dump_options.loss=true"),
        "TMP/run/debug_dump already holds a dump (…), and runs must not mix: choose another dump directory, delete "
        "this one, or ask for overwriting (debug.overwrite=true)",
    ),
    "a dump over the recording": (
        (
            "debug.enable_data_dump=true",
            "debug.dump_options.loss=true",
            "debug.dump_dir=recording",
            "debug.overwrite=true",
        ),
        "debug.overwrite=true would delete the recording TMP/recording that this run replays, because it lies in "
        "debug.dump_dir=recording; set debug.dump_dir to another directory.",
    ),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_run_that_asks_for_something_else(name: str, case: Any) -> None:
    overrides, says = ASKED[name]
    case.refuses(*mock(case.recording()), *overrides, says=says)


@pytest.mark.parametrize("override", ["threads=2", "system_envs.NCCL_ALGO=Ring"])
def test_another_environment_can_be_allowed(override: str, case: Any) -> None:
    case.trains(*mock(case.recording()), override, "rollout_worker.allow_environment_mismatch=true")


def test_a_refused_replay_leaves_the_dump_it_would_overwrite(case: Any) -> None:
    """Everything is compared before anything is removed: the last step as well as the first."""
    dump = case.recording()
    record = read(step_file(dump, 1))
    record.tensors["tokens"][0] += 1
    (dump / "manifest.json").unlink()
    step_file(dump, 1).write_bytes(b"".join(FORMATS["safetensors"].encode(record)))
    case.refuses(
        *mock(dump / "trajectory"),
        "debug.enable_data_dump=true",
        "debug.dump_options.loss=true",
        "debug.overwrite=true",
        says="TMP/recording/trajectory/step_000001.safetensors: group '000001-0000' run 0 was recorded for another "
        f"prompt than '…'; set task, seed and tokenizer {AS_RECORDED}",
    )


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
        "TMP/recording lacks 1 record files (trajectory/step_000001.safetensors); they were deleted or not copied: "
        "copy the dump again",
    ),
    "a step renamed": (
        _rename,
        "",
        "TMP/recording lacks 1 record files (trajectory/step_000000.safetensors); they were deleted or not copied: "
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
        state = f"is no intact {format} record…" if tenth else "is empty"
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
    case.refuses(*mock(path), says=f"TMP/alone.pt is no intact pt record: {clause}; {remedy}")
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


def test_another_type_of_record(case: Any) -> None:
    (path, *_) = (case.recording() / "loss").iterdir()
    case.refuses(
        *mock(path),
        says=f"TMP/recording/loss/{path.name} holds loss, not trajectories: give the file of the type trajectory",
    )


def test_another_tokenizer(case: Any) -> None:
    folder = case.checkpoint()
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + "{# the same, but for this #}")
    case.refuses(
        *mock(case.recording()),
        f"tokenizer.path={folder}",
        says="TMP/…0.safetensors: recorded with tokenizer … but this run uses …; give the recorded run's "
        "tokenizer.path or task",
    )


def test_missing_paths(case: Any) -> None:
    case.refuses(
        *mock("nowhere"), says="TMP/nowhere does not exist: check the path, or record this step first"
    )
    (case.folder / "empty").mkdir()
    case.refuses(
        *mock("empty"),
        says="TMP/empty is no complete dump: it has no manifest.json, which is written last, so the run was "
        "interrupted or the path is not that of a dump directory; record again or correct the path",
    )
    (case.folder / "prose.txt").write_text("not a recording")
    case.refuses(
        *mock("prose.txt"),
        says=f"TMP/prose.txt begins like no dump format (safetensors, pt, jsonl); {CUT_OFF}",
    )


def test_training_and_evaluation_confused(case: Any) -> None:
    rollouts = case.rollouts()
    case.refuses(
        *mock(rollouts / "val"),
        says="TMP/rollouts/val/step_000000.safetensors: group 'eval-0000' run 0 was recorded in evaluation but train "
        "mode asks for it; give the other folder",
    )
    (rollouts / "manifest.json").unlink()
    (rollouts / "val").rename(rollouts / "evaluated")
    (rollouts / "train").rename(rollouts / "val")
    (rollouts / "evaluated").rename(rollouts / "train")
    case.refuses(
        *rolled(rollouts),
        says="TMP/rollouts is no complete dump: …; record again or correct the path",
    )


def test_rollouts_without_the_evaluation_asked_for(case: Any) -> None:
    rollouts = case.rollouts()
    for path in (rollouts / "val").iterdir():
        path.unlink()
    (rollouts / "manifest.json").unlink()
    case.refuses(
        *rolled(rollouts),
        "evaluation.every_n_steps=1",
        says="TMP/rollouts is no complete dump: …; record again or correct the path",
    )
