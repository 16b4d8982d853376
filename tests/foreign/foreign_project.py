"""A project whose golden cases are replayed by somebody's own trainer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from regress.cli import main

ROOT = Path(__file__).parents[2]
BROKEN = """
import os
from regress.errors import NotSupported

def run(case, variant, precision, folder):
    {body}

def method(case, folder):
    pass
"""


class ForeignProject:
    """A folder with golden cases, tests of them, and an adapter.

    Attributes:
        folder: where it lies; commands run there.
    """

    def __init__(self, folder: Path, *cases: str) -> None:
        self.folder = folder
        for case in cases:
            shutil.copytree(ROOT / "golden" / case, folder / "golden" / case)
        shutil.copyfile(Path(__file__).with_name("adapter.py"), folder / "my_adapter.py")
        shutil.copyfile(ROOT / "examples" / "foreign_trainer.py", folder / "foreign_trainer.py")
        self.named("my_adapter:run")
        self.suite()

    def named(self, replay: str | None) -> None:
        """Say in pyproject.toml what replays cases."""
        lines = [] if replay is None else ["[tool.regress]", f'replay = "{replay}"']
        (self.folder / "pyproject.toml").write_text("\n".join([*lines, "[tool.pytest.ini_options]", ""]))

    def broken(self, body: str) -> None:
        """Write an adapter of a few lines, and name it."""
        (self.folder / "broken.py").write_text(BROKEN.format(body=body))
        self.named("broken:run")

    def suite(self, variants: str = "base") -> None:
        """Write the tests."""
        text = (
            f'import pytest\n@pytest.mark.regress(variants="{variants}")\ndef test_golden(regress_record):\n'
        )
        (self.folder / "test_suite.py").write_text(text + "    regress_record.check()\n")

    def plant(self, old: str, new: str) -> None:
        """Have the trainer compute something else."""
        (self.folder / "plant.json").write_text(json.dumps({"old": old, "new": new}))

    def pytest(self, *arguments: str) -> tuple[int, str]:
        """Exit code and output of a run."""
        return self._run("-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)

    def regress(self, *arguments: str) -> tuple[int, str]:
        """The same of the command line."""
        return self._run("-m", "regress", *arguments)

    def regress_here(self, *arguments: str) -> tuple[int, str]:
        """The same in this process, which has imported what it takes; modules of the project are forgotten again."""
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder)
            patch.syspath_prepend(self.folder)
            done = CliRunner().invoke(main, arguments)
        for name, module in [*sys.modules.items()]:
            if str(getattr(module, "__file__", None) or "").startswith(f"{self.folder}{os.sep}"):
                del sys.modules[name]
        return done.exit_code, done.output + ("" if done.exit_code in (0, 1, 2) else repr(done.exception))

    def _run(self, *command: str) -> tuple[int, str]:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
        environment.pop("CI", None)  # where goldens are not written
        done = subprocess.run(
            [sys.executable, *command],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr
