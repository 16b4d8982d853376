"""``regress replay`` and ``regress variants`` on a golden case, as people call them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

GOLDEN = str(Path(__file__).parents[3] / "golden")
TRUTH = json.loads((Path(GOLDEN) / "dr_grpo" / "manifest.json").read_text())["truth"]
TESTS = sum(len(recorded) + 3 for recorded in TRUTH.values())
"""Every recorded quantity of each update, and its trajectories, coverage and invariants."""
CASES = ", ".join(sorted(path.parent.name for path in Path(GOLDEN).glob("*/case.yaml")))

PROJECT = """
[tool.regress.variants.wrong]
why = "another clip range is other mathematics"
overrides = {algorithm = {clip_low = 0.01, clip_high = 0.01}}

[tool.regress.variants.impossible]
why = "no sample fits"
overrides = {batching = {max_tokens_per_microbatch = 1}}
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    return tmp_path


@pytest.fixture
def run(command: Callable[..., Any], project: Path) -> Callable[..., Any]:
    return lambda *arguments: command("replay", "dr_grpo", "--golden-dir", GOLDEN, *arguments)


def test_what_agrees_is_told_with_its_headroom_and_leaves_nothing(
    run: Callable[..., Any], project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tempfile

    (project / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(project / "tmp"))
    result = run("--variants", "base,packed", "--report", "out")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].split()[:3] == ["variant", "tokens", "weights"]
    assert [line.split()[0] for line in lines[2:4]] == ["base", "packed"]
    assert lines[-1].startswith(f"2 replays, {2 * TESTS} checks of ")
    assert lines[-1].endswith(" tensors: all within tolerance")
    tree = json.loads((project / "out" / "report.json").read_text())
    assert [row["variant"] for row in tree["variants"]] == ["base", "packed"]
    assert {"command", "versions", "machine"} <= tree["environment"].keys()
    assert not [path for path in (project / "tmp").iterdir() if path.name.startswith("regress")]


def test_what_does_not_agree_is_told_first_where_it_began(run: Callable[..., Any]) -> None:
    result = run("--variants", "base or wrong")
    assert result.exit_code == 1
    assert "drift: policy_loss: sample " in result.output
    assert "(dr_grpo/wrong/step0/rank0/micro0)" in result.output
    assert result.output.splitlines()[-1].endswith(" failed in 1 replay")


@pytest.mark.extended
def test_what_cannot_be_run_is_told_and_the_others_are_judged(run: Callable[..., Any]) -> None:
    result = run("--variants", "impossible,wrong,base")
    assert result.exit_code == 2
    assert "dr_grpo/impossible cannot be replayed: batching.max_tokens_per_microbatch=1 " in result.output
    assert "drift: policy_loss" in result.output
    assert result.output.splitlines()[-1].endswith("; 1 replay could not be judged")


def test_dumps_are_kept_where_it_is_asked_for(run: Callable[..., Any], project: Path) -> None:
    assert run("--variants", "base", "--keep-dumps", "kept").exit_code == 0
    assert (project / "kept" / "dr_grpo" / "base" / "dump" / "manifest.json").is_file()


def test_a_list_runs_nothing(run: Callable[..., Any]) -> None:
    result = run("--variants", "packed", "--tier", "all", "--list")
    assert result.exit_code == 0
    rows = [line.split()[:3] for line in result.output.splitlines()[2:] if line.startswith("dr_grpo")]
    assert rows == [["dr_grpo/packed", "1", str(TESTS)], ["dr_grpo/packed-fp32", "1", str(TESTS)]]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--variants", "nothing*"), "'nothing*' matches none of base, left"),
        (("--variants", "base and"), "'base and' is not an expression (at its end)"),
        (
            ("--variants", "left", "--tier", "bitwise"),
            "no variant of 'left' is replayed on dr_grpo in the tier b",
        ),
        pytest.param(("nothing",), f"'nothing' matches none of {CASES}; give a name", id="case"),
        (("--nnodes", "2"), "a pool of ranks lives on one machine; give --launcher torchrun"),
        (
            ("--launcher", "torchrun", "--nnodes", "2", "--node-rank", "2"),
            "there is no node 2 of 2; --node-rank",
        ),
        (
            ("--launcher", "torchrun", "--nnodes", "2", "--node-rank", "0"),
            "2 nodes need a place to meet; give --rdzv-",
        ),
        (
            ("--launcher", "torchrun", "--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "here:1"),
            "several nodes need one folder for their dumps; give --work",
        ),
    ],
)
def test_what_cannot_be_meant_is_one_sentence(
    run: Callable[..., Any], sentence: Callable[..., str], arguments: tuple[str, ...], says: str
) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert sentence(result).startswith(says)


def test_the_variants_are_listed_with_their_reasons(command: Callable[..., Any], project: Path) -> None:
    result = command("variants", "wrong,packed-pad16")
    assert result.exit_code == 0
    words = " ".join(result.output.split())
    assert (
        "packed-pad16 1 padding after the last sample float64 @experts layout=packed pad_to_multiple_of=16"
        in words
    )
    assert "wrong" in words
    assert words.endswith("2 variants")


@pytest.mark.extended  # tests/regression/test_launched_training.py starts two
def test_one_rank_can_be_started_by_a_launcher(run: Callable[..., Any]) -> None:
    result = run("--variants", "base", "--launcher", "torchrun")
    assert result.exit_code == 0, result.output
    assert "all within tolerance" in result.output


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_several_nodes_record_into_one_dump_which_the_first_judges(project: Path) -> None:
    """Two agents, as two machines would run them; the second is there first."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
    options = ("--golden-dir", GOLDEN, "--launcher", "torchrun", "--nnodes", "2", "--rdzv-endpoint", endpoint)
    command = [sys.executable, "-m", "regress", "replay", "dr_grpo", "--variants", "dp2", *options]
    environment = {**os.environ, "PYTHONPATH": str(Path(GOLDEN).parent)}
    nodes = [
        subprocess.Popen(
            [*command, "--work", str(project / "work"), "--node-rank", str(node)],
            cwd=project,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in (1, 0)
    ]
    (second, first) = (process.communicate(timeout=500)[0] for process in nodes)
    assert [process.returncode for process in nodes] == [0, 0], second + first
    assert second == ""
    assert first.splitlines()[2].split()[:3] == ["dp2", "equal", "equal"]
    assert first.splitlines()[-1].endswith(" tensors: all within tolerance")
    assert not (project / "work").exists()


def test_how_much_of_the_matrix_is_said_in_the_words_of_the_plugin(command: Callable[..., Any]) -> None:
    listed = {}
    for extent in ("reduced", "default", "full"):
        result = command("replay", "dense", "--golden-dir", GOLDEN, "--matrix", extent, "--list")
        assert result.exit_code == 0, result.output
        listed[extent] = len(result.output.splitlines())
    assert listed["reduced"] < listed["default"] < listed["full"]
