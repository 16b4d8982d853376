"""The command as people meet it: help that teaches, versions, the listing, the tables, and a run of its own."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import regress
from regress.dump.metrics_file import read_metrics

ROOT = Path(__file__).parents[3]


def examples(text: str) -> list[list[str]]:
    """The commands that a help text shows, as arguments."""
    return [
        shlex.split(line)[1:] for line in map(str.strip, text.splitlines()) if line.startswith("regress ")
    ]


@pytest.mark.parametrize(
    ("arguments", "teaches"),
    [
        ((), ["dump", "train", "Did you change how it is computed, or what is computed?"]),
        (
            ("train",),
            [
                "KEY=VALUE",
                "REGRESS_OPTIMIZER__LEARNING_RATE=1e-3",
                "--print-config",
                "demo_replay",
                "algorithm.preset",
            ],
        ),
        (("dump",), ["show", "check"]),
        (("golden",), ["calibrate", "validate", "export"]),
        (("golden", "validate"), ["CASE", "regress golden validate dense", "Exit codes: 0"]),
        (("dump", "show"), ["PATH", "regress dump show outputs/demo/debug_dump"]),
        (("dump", "diff"), ["FIRST SECOND", "regress dump diff", "Exit codes: 0"]),
    ],
)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help(arguments: tuple[str, ...], flag: str, teaches: list[str], command: Callable[..., Any]) -> None:
    result = command(*arguments, flag)
    assert result.exit_code == 0
    for words in teaches:
        assert words in result.output


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (("calibrate",), "'regress golden calibrate CASE'"),
        (("study",), "'regress golden validate CASE'"),
        (("dump", "diff"), "'regress compare --bitwise GOLDEN ACTUAL'"),
    ],
)
def test_an_old_spelling_works_and_says_the_new_one(
    old: tuple[str, ...], new: str, command: Callable[..., Any], tmp_path: Path
) -> None:
    """It does what it did: here, refuse what is not a case and no dump, with its own sentence."""
    nothing = str(tmp_path / "nothing")
    result = command(*old, nothing, *([nothing] if old[-1] == "diff" else []))
    assert result.exit_code == 2
    hint, error = result.stderr.splitlines()
    assert hint == f"hint: 'regress {' '.join(old)}' will go with the next release; say {new}"
    assert error.startswith("error: ")
    listed = command(*old[:-1], "--help").output
    assert not re.search(rf"^  {old[-1]}\b", listed, re.MULTILINE)


def test_the_examples_of_the_help_are_commands_that_work(command: Callable[..., Any]) -> None:
    shown = examples(command("train", "--help").output)
    assert len(shown) >= 4
    for arguments in shown:
        result = command(*arguments, "--print-config")
        assert result.exit_code == 0, f"{arguments}: {result.stderr}"
    (demo, replay) = (
        command("train", "--config-name", name, "--print-config").output for name in ("demo", "demo_replay")
    )
    recorded = re.search(r"^debug.dump_dir: (\S+)", demo, re.MULTILINE)
    replayed = re.search(r"^rollout_worker.trajectory_load_path: (\S+)", replay, re.MULTILINE)
    assert recorded is not None
    assert replayed is not None
    assert recorded[1] == replayed[1], "the second example replays what the first has recorded"


def test_version(command: Callable[..., Any]) -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert command("--version").output == f"regress, version {regress.__version__}\n"
    assert declared == regress.__version__


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["trian"], "No such command 'trian'"),
        (["train", "--steps"], "No such option '--steps'"),
        (["dump", "show"], "PATH"),
    ],
)
def test_a_command_mistyped(arguments: list[str], says: str, command: Callable[..., Any]) -> None:
    result = command(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Traceback" not in result.output


def test_print_config_shows_each_value_with_what_decided_it_and_runs_nothing(
    tmp_path: Path, command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my.yaml").write_text(
        "max_steps: 7\nalgorithm:\n  preset: dapo\nsystem_envs: {NCCL_ALGO: Tree}\n"
    )
    monkeypatch.setenv("REGRESS_OPTIMIZER__LEARNING_RATE", "2e-3")
    result = command("train", "--config-path", "my.yaml", "--print-config", "seed=5")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    for line in (
        "seed: 5  # command line",
        "max_steps: 7  # file my.yaml:1",
        "optimizer.learning_rate: 0.002  # environment REGRESS_OPTIMIZER__LEARNING_RATE",
        "algorithm.preset: dapo  # file my.yaml:3",
        "algorithm.clip_high: 0.28  # preset dapo",
        "device: cpu  # default",
    ):
        assert line in lines
    assert {path.name for path in tmp_path.iterdir()} == {"my.yaml"}
    assert "NCCL_ALGO" not in os.environ


def test_dump_show_a_directory_a_folder_and_a_file(
    case: Any, command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    dump = case.recording()
    whole = command("dump", "show", str(dump)).output
    assert "complete: 4 safetensors files as listed in manifest.json" in whole
    assert re.search(r"trajectory +safetensors +0-1 ", whole)
    assert re.search(r"loss +safetensors +0-1 ", whole)
    folder = command("dump", "show", str(dump / "trajectory")).output
    assert "complete: 2 safetensors files" in folder
    one = command("dump", "show", str(dump / "trajectory" / "step_000001.safetensors")).output
    assert "trajectory: step 1" in one
    for run in (0, 1):
        assert re.search(rf"000001-0001 +{run} ", one)
    (loss, *_) = (dump / "loss").glob("step_000000*")
    assert re.search(r"pg_loss +float32 ", command("dump", "show", str(loss)).output)
    (dump / "manifest.json").unlink()
    assert "not verified" in command("dump", "show", str(dump)).output


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere", "nowhere does not exist: check the path, or record this step first"),
        (
            "run/final",
            "run/final holds no dump: give a dump directory, a folder of step_* files, or one such file",
        ),
        (
            "run/notes.txt",
            "run/notes.txt begins like no dump format (safetensors, pt, jsonl); it was cut off or changed after it "
            "was written: copy it again or record again",
        ),
        (
            "run/final/model.safetensors",
            "run/final/model.safetensors is not an intact safetensors record: it holds tensors but no description of a "
            "record; …",
        ),
    ],
)
def test_dump_show_something_else(
    name: str, says: str, case: Any, command: Callable[..., Any], sentence: Callable[..., str]
) -> None:
    before = case.files()
    case.says(sentence(command("dump", "show", name)), says)
    case.unchanged(before)


def test_record_replay_and_compare(case: Any, command: Callable[..., Any]) -> None:
    """The three commands of the README, on another attention and layout too."""
    types = "{trajectory: true, forward_data: true, loss: true, gradient: true, param: true}"
    dumping = ("debug.enable_data_dump=true", f"debug.dump_options={types}", "optimizer.weight_decay=0.1")
    replaying = (
        "rollout_worker.type=mock",
        "rollout_worker.need_llm_inference=false",
        "rollout_worker.trajectory_load_path=first",
        *dumping,
    )
    told = case.trains(*dumping, "debug.dump_dir=first").output
    for line in (f"{case.run}/metrics.jsonl", f"{case.run}/final", "regress dump show first"):
        assert line in told.replace("\n", "")
    case.trains(*replaying, "debug.dump_dir=second")
    same = command("dump", "diff", "first", "second")
    assert same.exit_code == 0
    assert re.fullmatch(r"bit-identical: 10 records, \d\d tensors\n", same.stdout)
    case.trains(*replaying, "debug.dump_dir=third", "optimizer.learning_rate=1e-2")
    other = command("dump", "diff", "first", "third")
    assert other.exit_code == 1
    assert "trajectory" not in other.output
    assert other.stdout.splitlines()[0].startswith("param/step_000000_rank0.safetensors: ")
    (case.folder / "third" / "manifest.json").unlink()
    assert "third is not a complete dump" in command("dump", "diff", "first", "third").stderr


WATCHED = """
import atexit, json, os, sys

told = {}

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" and "DETERMINISTIC_MODE" not in told:
            told["DETERMINISTIC_MODE"] = os.environ.get("DETERMINISTIC_MODE")

def tell():
    import torch
    told["deterministic"] = torch.are_deterministic_algorithms_enabled()
    told["capability"] = torch.backends.cpu.get_cpu_capability()
    told["threads"] = torch.get_num_threads()
    with open(sys.argv[-1].partition("=")[2] + "/told.json", "w") as file:
        json.dump(told, file)

sys.meta_path.insert(0, Watch())
atexit.register(tell)
from regress.dump.metrics_file import read_metrics
from regress.cli import main
main()
"""


@pytest.mark.extended
def test_a_run_of_its_own_sets_the_environment_before_torch_starts_and_warns_of_nothing(
    tmp_path: Path, small: tuple[str, ...]
) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "ATEN_CPU_CAPABILITY"}
    output = tmp_path / "run"
    done = subprocess.run(
        [
            *(sys.executable, "-W", "error", "-c", WATCHED, "train", *small),
            "system_envs={DETERMINISTIC_MODE: 1, ATEN_CPU_CAPABILITY: default, CUBLAS_WORKSPACE_CONFIG: ':4096:8'}",
            "threads=2",
            "evaluation.every_n_steps=2",
            "debug.enable_data_dump=true",
            "debug.dump_options.trajectory=true",
            f"output_dir={output}",
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads((output / "told.json").read_text())
    assert told == {"DETERMINISTIC_MODE": "1", "deterministic": True, "capability": "DEFAULT", "threads": 2}
    manifest = json.loads((output / "debug_dump" / "manifest.json").read_text())
    variables = manifest["environment"]["variables"]
    assert variables["DETERMINISTIC_MODE"] == "1"
    assert variables["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert manifest["environment"]["threads"] == 2
    assert sorted({row["step"] for row in read_metrics(output / "metrics.jsonl")}) == [0, 1, 2]
    assert "step 2: greedy pass rate on held-out prompts" in done.stdout
