"""The plugin loads with every run of pytest, so it must cost next to nothing; and it loads once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = {
    "torch",
    "transformers",
    "numpy",
    "pandas",
    "ml_dtypes",
    "rich",
    "jinja2",
    "yaml",
    "xdist",
    "hypothesis",
}


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=True, timeout=60, env=environment
    )


def test_loading_imports_nothing_heavy() -> None:
    code = "import pytest, sys; before = set(sys.modules); import regress.plugin; print(*sys.modules.keys() - before)"
    loaded = set(python("-c", code).stdout.split())
    assert {name for name in loaded if not name.startswith("regress")} <= {"uuid", "platform"}
    assert not loaded & HEAVY


def test_a_run_without_any_check_imports_nothing_heavy(alone: Any) -> None:
    alone.write(
        "test_it.py", f"import sys\ndef test_it():\n    assert not {HEAVY - {'xdist'}} & sys.modules.keys()\n"
    )
    done = python("-m", "pytest", "-p", "regress.plugin", "--rootdir=.", str(alone.folder / "test_it.py"))
    assert "1 passed" in done.stdout


def test_loading_takes_less_than_pytest_does() -> None:
    """By the interpreter's own count of what modules cost, side by side in one process, at most three times."""

    def cost(lines: list[str], package: str) -> int:
        own = [line for line in lines if re.search(rf"\|\s+{package}(\.|$)", line)]
        assert own
        return sum(int(line.split("|")[0].split(":")[1]) for line in own)

    for _ in range(3):
        lines = python("-X", "importtime", "-c", "import pytest, regress.plugin").stderr.splitlines()
        if cost(lines, "regress") < cost(lines, "_pytest"):
            return
    pytest.fail("loading took more than pytest did, three times")


def test_the_entry_point_is_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"regress": "regress.plugin"}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("arguments", [("-p", "regress"), ()])
def test_an_installed_plugin_is_there_once(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    """As after `pip install`: the distribution says where the plugin is."""
    info = pytester.mkdir("grpo_regress-0.dist-info")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: grpo-regress\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[pytest11]\nregress = regress.plugin\n")
    pytester.makepyfile("def test_it(regress):\n    regress.assert_close(1, 1)\n")
    monkeypatch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(pytester.path), str(ROOT)]))
    others = (f"-pno:{name}" for name in ("hypothesispytest", "anyio", "hydra_pytest", "xdist", "timeout"))
    result = pytester.runpytest_subprocess(*arguments, *others)
    result.assert_outcomes(passed=1)
    refused = pytester.runpytest_subprocess("-p", "no:regress")
    refused.stdout.fnmatch_lines(["*fixture 'regress' not found"])


@pytest.mark.parametrize("workers", [(), ("-p", "xdist", "-n1")])
def test_updating_checks_of_numbers_needs_no_torch(alone: Any, workers: tuple[str, ...]) -> None:
    told = "import sys\n\ndef pytest_unconfigure():\n    print('torch loaded:', 'torch' in sys.modules)\n"
    alone.write("conftest.py", told)
    alone.write("test_it.py", "def test_it(regress):\n    regress.check('x', 1.5)\n")
    arguments = ("-p", "regress.plugin", *workers, "--update-golden", str(alone.folder))
    done = python("-m", "pytest", "-p", "no:cacheprovider", *arguments)
    assert "1 written: git diff" in done.stdout
    assert "torch loaded: False" in done.stdout
