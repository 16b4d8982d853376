"""The script of the GitHub Action for a change that is said to be none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import yaml

ACTION = Path(__file__).parents[3] / "actions" / "same"
TRAINER = """
import sys
import numpy as np
from regress import Recorder, at, recording, tap
recorder = Recorder(sys.argv[1], options={"loss": True})
with recording(recorder), at(step=0, rank=0, micro=0):
    tap("loss", {"loss": np.float64(VALUE)})
recorder.close()
"""


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True, timeout=60)


def run(folder: Path, *, value: str, target: str = "main") -> subprocess.CompletedProcess[str]:
    """Record 1.0 on the target branch and another value on the change, and run the script."""
    git(folder, "init", "-q", "-b", "main")
    (folder / "train.py").write_text(TRAINER.replace("VALUE", "1.0"))
    git(folder, "add", "train.py")
    git(folder, "commit", "-qm", "base")
    (folder / "train.py").write_text(TRAINER.replace("VALUE", value))
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    environment["GITHUB_STEP_SUMMARY"] = str(folder / "summary.md")
    command = [str(ACTION / "same.sh"), target, f"{sys.executable} train.py {{dump}}", "report"]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_same_values_pass_and_other_values_fail(tmp_path: Path) -> None:
    for name, value, code in (("same", "1.0", 0), ("other", "2.0", 1)):
        folder = tmp_path / name
        folder.mkdir()
        done = run(folder, value=value)
        assert done.returncode == code, done.stdout + done.stderr
        summary = (folder / "summary.md").read_text()
        assert ("❌" in summary) is bool(code)
        assert "Headroom" in summary
        assert (folder / "report" / "index.html").is_file()
        trees = subprocess.run(
            ["git", "worktree", "list"], cwd=folder, capture_output=True, text=True, timeout=60, check=True
        )
        assert len(trees.stdout.splitlines()) == 1


def test_an_unknown_target_fails(tmp_path: Path) -> None:
    done = run(tmp_path, value="1.0", target="nowhere")
    assert done.returncode not in (0, 1)
    assert "nowhere" in done.stderr


def test_the_action_gives_the_script_its_inputs_by_the_environment() -> None:
    """Text of a pull request in a command line would be run."""
    tree = yaml.safe_load((ACTION / "action.yml").read_text())
    (step,) = tree["runs"]["steps"]
    assert "${{" not in step["run"]
    assert step["env"].keys() == {"TARGET", "COMMAND", "REPORT"}
    assert tree["inputs"].keys() == {"command", "target", "report"}
