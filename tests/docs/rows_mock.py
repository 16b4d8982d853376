"""Rows of the document on recorded rollouts."""

from __future__ import annotations

import filecmp
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.docs.walking import ROOT, SMALL, Done, Walk, shows

BLOCK = """\
defaults: [reverse_string, _self_]
exp_name: "sokoban_precision_test_dump"
max_steps: 50

# Rollout Mock Configuration - DUMP MODE
rollout_mock:
  enable: true
  mode: dump
  dump_dir: ./output/rollout_dumps/baseline_v1

# 用于确定性执行的环境变量
system_envs:
  NCCL_ALGO: Ring
  NVTE_ALLOW_NONDETERMINISTIC_ALGO: '0'
  CUBLAS_WORKSPACE_CONFIG: ':4096:8'
  DETERMINISTIC_MODE: '1'
"""
DUMPS = "output/rollout_dumps/baseline_v1"


def roll(walk: Walk, *more: str, to: str, code: int = 0) -> Done:
    """The document's command."""
    walk.write("roll.yaml", BLOCK)
    every = ("evaluation.every_n_steps=1", f"output_dir={to}")
    return walk.regress(
        "train", "--config_name", "roll", "--config_path", ".", *SMALL, *every, *more, code=code
    )


def recorded(walk: Walk) -> Done:
    return roll(walk, to="roll_a")


def mocked(walk: Walk, *more: str, to: str = "roll_b", code: int = 0) -> Done:
    recorded(walk)
    return roll(walk, "rollout_mock.mode=mock", *more, to=to, code=code)


@shows(
    "rollout-mock",
    *("rollout_mock: {enable", "system_envs", "a file for each step", "files end in .pkl", "--config_name"),
)
def rollouts_are_recorded(walk: Walk) -> None:
    recorded(walk)
    train = sorted(
        path.name for path in walk.path(f"{DUMPS}/train").iterdir() if path.name.startswith("step")
    )
    assert train == ["step_000000.safetensors", "step_000001.safetensors"]
    assert any(walk.path(f"{DUMPS}/val").glob("step_000000*"))
    assert not [*walk.path(DUMPS).rglob("*.pkl")]
    assert "train" in walk.regress("dump", "show", DUMPS).output
    manifests = "".join(path.read_text() for path in walk.path(DUMPS).rglob("manifest.json"))
    for name in (
        "NCCL_ALGO",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        "CUBLAS_WORKSPACE_CONFIG",
        "DETERMINISTIC_MODE",
    ):
        assert name in manifests, name


@shows("rollout-mock", "log line of the mode", "log lines of each step", "disk space estimated")
def the_log_tells_of_the_recording(walk: Walk) -> None:
    told = recorded(walk).told
    assert f"[Rollout Mock] Rollout Mock enabled: mode=dump, dir=./{DUMPS}" in told
    assert (
        f"[Rollout Mock] Dumped step 1: ./{DUMPS}/train/step_000001.safetensors (samples=16, size=" in told
        or ("[Rollout Mock] Dumped step 1: " in told and "(samples=16, size=" in told)
    ), told
    assert told.index("free") < told.index("Dumped step 0"), told
    told = mocked(walk).told
    assert "[Rollout Mock] Rollout Mock enabled: mode=mock" in told
    assert "[Rollout Mock] Loaded step 1: " in told
    assert "(samples=16)" in told


@shows(
    "rollout-mock",
    *("mode: mock", "everything after the rollout", "no sampling", "training metrics compared"),
)
def a_replay_is_the_recorded_run(walk: Walk) -> None:
    mocked(walk)
    finals = [walk.path(f"{run}/final/model.safetensors") for run in ("roll_a", "roll_b")]
    assert filecmp.cmp(*finals, shallow=False)
    names = ("policy_loss", "loss", "approx_kl/k3", "grad_norm")
    for name in names:
        assert walk.values("roll_a", f"training_step/{name}") == walk.values(
            "roll_b", f"training_step/{name}"
        )
    page = walk.regress("report", "roll_a", "roll_b")
    assert "html" in page.output
    (path,) = [Path(word) for word in page.output.split() if word.endswith(".html")]
    text = (walk.folder / path).read_text()
    assert all(name in text for name in ("training_step/loss", "training_step/grad_norm"))


@shows("rollout-mock", "numerical precision of a change")
def a_healthy_change_raises_no_alarm(walk: Walk) -> None:
    """The 100 replays are an extended test of their own: tests/regression/test_compared_replays.py."""
    dump = (
        "debug.enable_data_dump=true",
        "debug.dump_options.param=true",
        "debug.dump_options.gradient=true",
    )
    mocked(walk, *dump, to="A")
    mocked(walk, *dump, "batching.layout=packed", "batching.micro_batch_size=3", to="B")
    assert "within tolerance" in walk.regress("compare", "A/debug_dump", "B/debug_dump").told


@shows("rollout-mock", "tensor, pipeline and expert parallelism")
def layouts_are_replayed(walk: Walk) -> None:
    told = walk.regress(
        "replay", "dense", "--variants", "tp2,pp2,packed", "--golden-dir", ROOT / "golden"
    ).told
    assert all(name in told for name in ("tp2", "pp2", "packed"))
    assert "drift" not in told


@shows("rollout-mock", "another mode than dump or mock")
def another_mode_is_refused(walk: Walk) -> None:
    told = roll(walk, "rollout_mock.mode=mok", to="roll_c", code=2).told
    assert "dump, mock" in told


@shows("rollout-mock", "DETERMINISTIC_MODE", "the same environment")
def the_environment_has_to_be_the_same(walk: Walk) -> None:
    recorded(walk)
    told = mocked(walk, "system_envs.NCCL_ALGO=Tree", to="roll_d", code=2).told
    assert "Tree" in told
    assert "Ring" in told
    told = mocked(walk, "~system_envs.DETERMINISTIC_MODE", to="roll_h", code=2).told
    assert "DETERMINISTIC_MODE" in told
    mocked(walk, "system_envs.NCCL_ALGO=Tree", "rollout_worker.allow_environment_mismatch=true", to="roll_i")


@shows(
    "rollout-mock",
    *(
        "the same dump_dir",
        "training and evaluation apart",
        "max_steps no larger",
        "a missing file",
        "train and val",
    ),
)
def what_is_missing_is_named(walk: Walk) -> None:
    told = mocked(walk, "rollout_mock.dump_dir=./nope", to="roll_e", code=2).told
    assert "nope" in told
    told = mocked(walk, "max_steps=3", to="roll_f", code=2).told
    assert "steps 0-1" in told or "0-1" in told, told
    assert "max_steps" in told
    for part, name in (("val", "noval"), ("train", "notrain")):
        shutil.copytree(walk.path(DUMPS), walk.path(name), dirs_exist_ok=True)
        shutil.rmtree(walk.path(name) / part)
        told = mocked(walk, f"rollout_mock.dump_dir=./{name}", to=f"roll_{name}", code=2).told
        assert f"{name}/{part}" in told, told
    shutil.copytree(walk.path(DUMPS), walk.path("nofile"), dirs_exist_ok=True)
    (walk.path("nofile") / "train/step_000001.safetensors").unlink()
    told = mocked(walk, "rollout_mock.dump_dir=./nofile", to="roll_g", code=2).told
    assert "lacks 1 record" in told or "step_000001" in told


@shows("rollout-mock", "a full disk while recording")
def a_full_disk_is_one_sentence(walk: Walk) -> None:
    folder = walk.path("full")
    folder.mkdir(exist_ok=True)
    mounted = os.geteuid() == 0 and not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", folder], check=False, capture_output=True
    ).returncode  # fmt: skip
    if not mounted:
        pytest.skip("a full disk needs the right to mount a small one")
    try:
        failed = roll(walk, "rollout_mock.dump_dir=./full/dumps", to="roll_full", code=2)
        assert "No space left on device" in failed.errors
        assert len([line for line in failed.errors.splitlines() if line.startswith("error: ")]) == 1
        assert not [*folder.rglob("manifest.json")]
    finally:
        subprocess.run(["umount", folder], check=True)


@shows("rollout-mock", "a store in the network")
def a_recording_lies_in_a_store(walk: Walk) -> None:
    """A URL of fsspec whose protocol needs no network: a folder behind ``dir``'s file system."""
    walk.write("store.py", STORE)
    done = walk.run("python", "store.py", walk.path("bucket"), *SMALL)
    assert "Loaded step 1" in done.told


STORE = '''\
"""Record into a store and replay from it, in one process: memory:// does not outlive it."""
import sys

from click.testing import CliRunner

from regress.cli import main

run = ["train", *sys.argv[2:], "rollout_mock.enable=true", "rollout_mock.dump_dir=memory://bucket/rollouts"]
for mode in ("dump", "mock"):
    done = CliRunner().invoke(main, [*run, f"rollout_mock.mode={mode}", f"output_dir={sys.argv[1]}/{mode}"])
    print(done.output)
    assert done.exit_code == 0
'''


@shows("rollout-mock", "pickle versions")
def pickles_are_never_executed(walk: Walk) -> None:
    import pickle

    class Trap:
        def __reduce__(self) -> object:
            return (os.mkdir, (str(walk.path("executed")),))

    for suffix in ("pkl", "pt"):
        path = walk.path(f"pickled/train/step_000000.{suffix}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps(Trap()))
        told = mocked(walk, "rollout_mock.dump_dir=./pickled", to=f"roll_{suffix}", code=2).told
        assert len(told) > 40
        assert not walk.path("executed").exists()
        path.unlink()


@shows("rollout-mock", "recording again")
def recording_again_names_the_key(walk: Walk) -> None:
    recorded(walk)
    assert "rollout_mock.overwrite=true" in roll(walk, to="roll_again", code=2).told


@shows("rollout-mock", "regression tests in continuous integration")
def continuous_integration_is_tox(walk: Walk) -> None:
    assert "tox run" in (ROOT / ".ci" / "run").read_text()
