"""The examples: each records the same training in two layouts, which have to be equal; a planted fault has to show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from regress import Comparison, compare_sources
from regress.replay.replay_pool import shared_pool
from tests.examples.scripts import run_script

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run(folder: Path, *command: str | Path) -> None:
    """Run Python in a folder."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def run_each(folder: Path, *commands: tuple[str | Path, ...]) -> None:
    """Run scripts one after the other, each in a fresh process that has imported what all of them need."""
    for command in commands:
        shared_pool().run(run_script, {"folder": folder, "command": [*map(str, command)]}, 1)


def quantities(found: Comparison) -> set[str]:
    return {verdict.quantity for verdict in found.verdicts}


def equal(folder: Path, golden: str, actual: str) -> None:
    """Both dumps hold everything and agree."""
    found = compare_sources(str(folder / golden), str(folder / actual))
    assert found.exit_code == 0, [verdict.detail for verdict in found.failed]
    assert quantities(found) >= {"log_probs", "token_gradient", "gradient", "param", "optimizer"}


def test_a_plain_loop(tmp_path: Path) -> None:
    """Catches a layout that is inferred wrongly, and a denominator of the microbatch that nobody sees."""
    loop = EXAMPLES / "plain_loop.py"
    source = loop.read_text()
    faulty = source.replace("/ total", "/ sum(len(ids) - first for ids, _, _, first in own)")
    assert faulty != source
    (tmp_path / "faulty.py").write_text(faulty)
    (tmp_path / "tiny_model.py").symlink_to(EXAMPLES / "tiny_model.py")
    run_each(
        tmp_path, (loop, "padded"), (loop, "packed", "packed", "3"), ("faulty.py", "wrong", "packed", "3")
    )
    equal(tmp_path, "padded", "packed")
    found = compare_sources(str(tmp_path / "padded"), str(tmp_path / "wrong"))
    assert found.exit_code == 1
    first = {verdict.quantity for verdict in found.failed if verdict.place.step == 0}
    assert {"token_gradient", "gradient"} <= first
    assert not {"log_probs", "entropy", "batch_inputs", "coverage"} & first


@pytest.mark.extended
def test_fsdp2_on_two_ranks(tmp_path: Path) -> None:
    """The example itself asserts that its parameters are sharded."""
    run(tmp_path, EXAMPLES / "fsdp2.py", "one")
    run(tmp_path, *TORCHRUN, EXAMPLES / "fsdp2.py", "two")
    equal(tmp_path, "one", "two")


def test_each_is_short() -> None:
    for name in ("plain_loop", "trl_grpo", "fsdp2"):
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 40


@pytest.mark.extended
def test_the_demo_ends_with_what_it_has_shown(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "demo.py"), "dr_grpo", "--variants", "base,mbs4"]
    (tmp_path / "golden").symlink_to(EXAMPLES.parent / "golden")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    *_, title, replayed, closest, left_out, bitwise, page = done.stdout.splitlines()
    assert title == "What this has shown:"
    assert re.fullmatch(
        r"  replayed +recorded GRPO steps under 2 layouts: .*: all within tolerance", replayed
    )
    assert re.fullmatch(
        r"  closest call +\w+ of case dr_grpo under layout (base|mbs4), 0\.\d+ of .*", closest
    )
    assert left_out == "  left out      nothing"
    assert bitwise.endswith("702 checks of 702 tensors: all within tolerance")
    assert (tmp_path / page.split()[4]).is_file()
