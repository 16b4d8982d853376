"""The tests in an environment that has what ``pip install .`` installs, and nothing that only they need."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GROUP = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["test"]
README = ("-k", "packed and micro1 and log_probs")


def without(folder: Path, *names: str) -> Path:
    """A directory of links to all that is installed here, but for some distributions."""
    left = set()
    for name in names:
        found = distribution(name)
        left |= {str(file).partition("/")[0] for file in found.files or () if not str(file).startswith("..")}
    folder.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if path.name not in left | {"__pycache__"}:
            (folder / path.name).symlink_to(path)
    return folder


def run(packages: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on this source tree with these packages and no others."""
    command = [sys.executable, "-S", "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    own = {"PYTHONPATH": os.pathsep.join([str(packages), str(ROOT)]), "PYTHONDONTWRITEBYTECODE": "1"}
    kept = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(command, cwd=ROOT, env={**kept, **own}, capture_output=True, text=True, timeout=600)


def test_what_the_tests_need_is_named_with_the_command_that_installs_it(tmp_path: Path) -> None:
    """The command that the README shows; without the sentence it ends with fifteen errors of collection."""
    gone = ("pytest-timeout", "hypothesis", "jsonschema")
    told = run(without(tmp_path / "packages", *gone), *README)
    assert told.returncode == pytest.ExitCode.USAGE_ERROR, told.stdout
    (line,) = [line for line in told.stderr.splitlines() if line.startswith("ERROR: ")]
    command = shlex.split(line.partition("; run ")[2])
    assert command[:4] == ["python", "-m", "pip", "install"]
    assert command[4:] == [one for one in GROUP if re.split(r"[^\w-]", one, maxsplit=1)[0] in gone]
    assert "Traceback" not in told.stdout + told.stderr


@pytest.mark.extended
def test_with_it_the_command_of_the_readme_finds_its_tests(tmp_path: Path) -> None:
    found = run(without(tmp_path / "packages"), *README, "--collect-only", "-q")
    assert found.returncode == 0, found.stdout[-2000:]
