"""Places that cannot be written, full disks, numbers that are none: earlier files stay, nothing looks whole."""

from __future__ import annotations

import errno
import json
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from regress.cli import main
from regress.dump.dump_reader import read
from regress.dump.metrics_file import metrics_of, read_metrics

DUMPING = ("debug.enable_data_dump=true", "debug.dump_options={trajectory: true, loss: true, param: true}")


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("a_file", "File exists"),
        ("a_file/below", "Not a directory"),
        ("/proc/nowhere", "No such file or directory"),
    ],
)
def test_output_dir(path: str, why: str, case: Any) -> None:
    (case.folder / "a_file").write_text("precious")
    case.refuses(
        f"output_dir={path}",
        says=f"output_dir='{path}' cannot be written ({why}); free space there or choose another output_dir",
    )


@pytest.mark.parametrize("key", ["debug.dump_dir", "rollout_mock.dump_dir"])
@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("a_file", "File exists): a file stands where a folder is needed: choose another dump directory"),
        (
            "a_file/below",
            "Not a directory): a file stands where a folder is needed: choose another dump directory",
        ),
        ("/proc/nowhere", "No such file or directory): choose another dump directory"),
    ],
)
def test_dump_dir(key: str, path: str, why: str, case: Any) -> None:
    (case.folder / "a_file").write_text("precious")
    asked = DUMPING if key == "debug.dump_dir" else ("rollout_mock.enable=true",)
    case.refuses(*asked, f"{key}={path}", says=f"{path} cannot be written ({why}")


def test_two_dumps_in_one_directory(case: Any) -> None:
    case.refuses(
        *DUMPING,
        "debug.dump_dir=both",
        "rollout_mock.enable=true",
        "rollout_mock.dump_dir=both",
        says="debug.dump_dir=both and rollout_mock.dump_dir are one directory, which holds only one dump; set them "
        "to different directories.",
    )


@pytest.mark.parametrize("name", ["final", "metrics.jsonl"])
def test_something_else_under_the_name_of_an_output(name: str, case: Any) -> None:
    if name == "final":
        (case.folder / "other").mkdir()
        (case.folder / "other" / "final").write_text("precious")
    else:
        (case.folder / "other" / "metrics.jsonl").mkdir(parents=True)
    case.refuses(
        "output_dir=other",
        says=f"other/{name} is not what a run writes under this name; move it away or choose another output_dir",
    )


def test_a_run_that_ends_well_replaces_the_files_of_an_earlier_one(case: Any) -> None:
    before = case.files()
    (case.run / "final" / "stale.txt").write_text("of another model")
    case.trains("seed=1", "max_steps=1")
    after = case.files()
    assert sorted(path.name for path in case.run.iterdir()) == [
        "debug_dump",
        "final",
        "metrics.jsonl",
        "notes.txt",
    ]
    assert {path.name for path in before if path.parent.name == "final"} == {
        path.name for path in (case.run / "final").iterdir()
    }
    for name in ("metrics.jsonl", "final/model.safetensors"):
        assert after[case.run / name] != before[case.run / name]
    assert {row["step"] for row in read_metrics(case.run / "metrics.jsonl")} == {0, 1}


def test_a_run_without_steps_has_only_its_totals(case: Any) -> None:
    case.trains("max_steps=0")
    (row,) = read_metrics(case.run / "metrics.jsonl")
    assert metrics_of(row) == {"final/total_steps": 0, "final/total_batches": 0, "final/total_rollouts": 0}


@pytest.mark.parametrize("allowed", [0, 1, 3, 5])
def test_a_disk_that_fills_up_while_dumping(allowed: int, case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dump's files go through os.write; from one of them on there is no space."""
    calls = 0
    write = os.write

    def full(handle: int, data: bytes) -> int:
        nonlocal calls
        calls += 1
        if calls > allowed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(handle, data)

    monkeypatch.setattr("regress.dump.dump_files.os.write", full)
    case.refuses(
        *DUMPING,
        "debug.dump_dir=new",
        "debug.dump_format=jsonl",
        says="new/…/step_….jsonl cannot be written (No space left on device): free space there or choose another "
        "dump directory",
    )
    monkeypatch.undo()
    assert calls > allowed
    whole = [path for path in (case.folder / "new").rglob("*") if path.is_file()]
    assert not (case.folder / "new" / "manifest.json").exists()
    assert len(whole) == allowed // 2  # a file takes two writes: the text and its seal
    for path in whole:
        read(path)


def test_a_disk_that_fills_up_at_the_manifest(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last file of the dump fails: then model and metrics do not take the place of earlier ones either."""

    write = os.write

    def full(handle: int, data: bytes) -> int:
        if b'"complete"' in bytes(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(handle, data)

    monkeypatch.setattr("regress.dump.dump_files.os.write", full)
    case.refuses(
        *DUMPING,
        "debug.dump_dir=new",
        says="new/manifest.json cannot be written (No space left on device): free space there or choose another dump "
        "directory",
    )
    assert not (case.folder / "new" / "manifest.json").exists()


def limited(size: int, *arguments: str) -> tuple[int, str]:
    """Exit code and errors of the command in a fork of this process, which cannot write files of more than ``size``."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            result = CliRunner().invoke(main, arguments)
            os.write(writer, json.dumps([result.exit_code, result.stderr]).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        told = file.read()
    os.waitpid(child, 0)
    code, errors = json.loads(told)
    return code, errors


def test_a_limit_on_file_sizes(case: Any, small: tuple[str, ...]) -> None:
    """The model is the first file that is too large; the earlier one stays."""
    before = case.files()
    size = (case.run / "final" / "model.safetensors").stat().st_size
    code, errors = limited(size - 1, "train", "--overwrite", *small, f"output_dir={case.run}")
    assert code == 2
    (line,) = errors.splitlines()
    case.says(
        line,
        "error: output_dir='TMP/run' cannot be written (…File too large…); free space there or choose another "
        "output_dir",
    )
    case.unchanged(before)
    assert not (case.run / "final.partial").exists()


def poison(case: Any, name: str, row: int) -> Path:
    """The earlier run's model with NaN in one row of a weight."""
    folder: Path = case.checkpoint()
    tensors = load_file(folder / "model.safetensors")
    tensors[name][row] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_loss_that_is_nan_names_its_microbatch_and_samples(case: Any) -> None:
    """The embedding of a token is NaN that the first group, in the first two microbatches, does not read."""
    (recording,) = case.recording().glob("trajectory/*0.safetensors")
    first, second = (set(tokens) for tokens in groups_of(recording))
    token = min(second - first)
    case.refuses(
        "rollout_worker.type=mock",
        "rollout_worker.need_llm_inference=false",
        "rollout_worker.trajectory_load_path=recording",
        f"model.path={poison(case, 'model.embed_tokens.weight', token)}",
        "batching.micro_batch_size=1",
        "debug.enable_data_dump=true",
        "debug.dump_options.forward_data=true",
        "debug.dump_dir=new",
        says="microbatch 2 (samples 000000-0001/0) has no loss, so no update was made: log_probs_K is nan at token "
        "0: it must be finite at every loss token, so leave such tokens out of the loss mask or find what produced "
        "them.",
    )
    culprit = read(case.folder / "new" / "forward_data" / "step_000000_rank0_micro2.safetensors")
    assert not np.isfinite(culprit.tensors["log_probs"]).all(), "the dump shows what was refused"
    assert not (case.folder / "new" / "manifest.json").exists()


def groups_of(recording: Path) -> tuple[list[int], list[int]]:
    """The tokens of both groups of two samples; the prompts come first, and only they are sure to be read."""
    tensors = read(recording).tensors
    tokens, lengths = tensors["tokens"].tolist(), tensors["lengths"].tolist()
    half, prompt = sum(lengths[:2]), int(tensors["prompt_length"][2])
    return tokens[:half], tokens[half : half + prompt]


def test_a_policy_that_gives_no_probabilities(case: Any) -> None:
    case.refuses(
        f"model.path={poison(case, 'lm_head.weight', 3)}",
        says="nothing can be sampled for group '000000-0000' run 0 in train step 0, because the policy's logits are "
        "not finite; check the weights of model.path, lower the learning rates, or raise optimizer.eps or "
        "rollout_worker.temperature",
    )


def test_weights_that_the_last_update_spoiled_are_not_saved(case: Any) -> None:
    """An eps of 0 in float32: parameters without gradient become 0/0."""
    case.refuses(
        "optimizer.eps=1e-300",
        "max_steps=1",
        says="… holds values that are not finite, so the model is not saved; lower the learning rates or raise "
        "optimizer.eps",
    )
    first = read_metrics(case.run / "metrics.jsonl")[0]
    assert (first["step"], first["segment"]) == (0, 0), "the metrics until then are there to be looked at"
