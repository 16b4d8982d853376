"""Recordings that do not fit the run stop a replay with a sentence; nothing is ever invented."""

from __future__ import annotations

from typing import Any

import pytest

from regress.dump.dump_reader import read
from regress.dump.formats import FORMATS
from regress.dump.recorded_trajectories import read_trajectories
from tests.unit.cli.recordings import CUT_OFF, alone, mock, rolled, step_file

AS_RECORDED = "as in the recorded run"


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
        says="TMP/empty is not a complete dump: it has no manifest.json, which is written last, so the run was "
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
    (rollouts / "val").rename(rollouts / "evaluated")
    (rollouts / "train").rename(rollouts / "val")
    (rollouts / "evaluated").rename(rollouts / "train")
    case.refuses(
        *rolled(rollouts),
        says="TMP/rollouts has additional 1 record file (train/step_000002.safetensors); they are not of this run: "
        "move them away",
    )


def test_rollouts_without_the_evaluation_asked_for(case: Any) -> None:
    folder = case.folder / "unevaluated"
    case.trains(
        "rollout_mock.enable=true", f"rollout_mock.dump_dir={folder}", f"output_dir={case.folder / 'other'}"
    )
    case.trains(*rolled(folder))
    case.refuses(
        *rolled(folder),
        "evaluation.every_n_steps=1",
        says="TMP/unevaluated/val does not exist: check the path, or record this step first",
    )
