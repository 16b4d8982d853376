"""A copy of the package without the rooms that stand on the core: everything of the core works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEAVES = ("service", "systems", "doctor", "interop")
SMALL = (
    *("model.config.hidden_size=16", "model.config.num_hidden_layers=1", "data.prompts_per_step=2"),
    *(
        "tracking.trackers=[]",
        "optimizer.warmup_steps=0",
        "debug.enable_data_dump=true",
        "debug.dump_options.loss=true",
    ),
)


class Core:
    """A copy of the package with nothing but the core, and commands of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        left = {str(ROOT / "regress" / leaf) for leaf in LEAVES}
        shutil.copytree(
            ROOT / "regress",
            folder / "regress",
            ignore=lambda where, names: [
                name for name in names if f"{where}/{name}" in left or name == "__pycache__"
            ],
        )

    def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Python with the copy."""
        paths = os.pathsep.join(map(str, (self.folder, ROOT / "tests/unit/oracle")))
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=False,
        )

    def refuses(self, *arguments: str) -> str:
        """Run ``regress``, which ends with 2; return what it prints, as one line."""
        done = self.python("-m", "regress", *arguments)
        assert done.returncode == 2, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return " ".join((done.stdout + done.stderr).split())

    def run(self, *arguments: str) -> str:
        """Run ``regress``, which ends with 0; return what it prints."""
        done = self.python("-m", "regress", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Core:
    return Core(tmp_path_factory.mktemp("core"))


def test_the_help_has_the_commands_of_the_core(core: Core) -> None:
    listed = [
        line.split()[0] for line in core.run("--help").partition("Commands:")[2].splitlines() if line.strip()
    ]
    assert {"compare", "dump", "explain", "golden", "oracle", "replay", "report", "train"} <= {*listed}
    assert not {"doctor", "serve", "systems"} & {*listed}
    assert "No such command 'serve'" in core.refuses("serve")


@pytest.mark.extended
def test_no_public_name_and_no_module_of_the_core_needs_another(core: Core) -> None:
    code = (
        "import importlib, pkgutil, regress\n"
        "for name in regress.__all__: getattr(regress, name)\n"
        "for found in pkgutil.walk_packages(regress.__path__, 'regress.'):\n"
        "    if not found.name.endswith('__main__'): importlib.import_module(found.name)"
    )
    done = core.python("-c", code)
    assert done.returncode == 0, done.stderr


def test_a_case_is_replayed_and_its_dumps_are_compared(core: Core) -> None:
    golden = ("--golden-dir", str(ROOT / "golden"))
    said = core.run("replay", "dense", "--variants", "base,mbs4", "--keep-dumps", "dumps", *golden)
    assert "all within tolerance" in said
    base, other = (f"dumps/dense/{name}/dump" for name in ("base", "mbs4"))
    assert "all within tolerance" in core.run("compare", f"golden:{ROOT / 'golden/dense'}", other)
    core.run("compare", base, other)
    core.run("golden", "verify", "dense", *golden)


def test_files_of_weights_are_compared(core: Core) -> None:
    weights = ROOT / "golden/dense/model/model.safetensors"
    assert "1 tensor" in core.run("compare", "--only", "param/lm_head.weight", str(weights), str(weights))


@pytest.mark.extended
def test_a_run_goes_on_from_its_checkpoint(core: Core) -> None:
    asked = ("train", "--config-name", "reverse_string", *SMALL, "output_dir=run", "trainer.save_steps=1")
    core.run(*asked, "max_steps=1")
    assert "2 steps done" in core.run(*asked, "max_steps=2", "trainer.resume_from_checkpoint=latest")
    core.run("dump", "check", "run/debug_dump")
    core.run("report", "run")


@pytest.mark.extended
def test_a_recorded_trainer_is_explained_and_judged(core: Core) -> None:
    done = core.python(
        "-c", "from pathlib import Path; from plain_loop import train; train(Path('recorded'))"
    )
    assert done.returncode == 0, done.stderr
    core.run("explain", "recorded")
    core.run("oracle", "recorded", "--preset", "dapo")


@pytest.mark.extended
def test_golden_tests_pass(core: Core) -> None:
    (core.folder / "test_it.py").write_text(
        "def test_golden(regress_record):\n    regress_record.check()\n", encoding="utf-8"
    )
    plugin = () if "regress" in entry_points(group="pytest11").names else ("-p", "regress.plugin")
    done = core.python(
        *("-m", "pytest", "-q", *plugin, "-p", "no:cacheprovider", "test_it.py"),
        *("--golden-dir", str(ROOT / "golden"), "-k", "dense and mbs4 and log_probs"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("train", "trainer.type=remote"), "nothing that is installed provides 'remote' of regress.trainers"),
        (
            ("replay", "dense", "--variants", "remote-weaver", "--golden-dir", str(ROOT / "golden")),
            "'remote-weaver' matches none of",
        ),
        (
            ("compare", "--self_hosted_dir", "a", "--weaver_dir", "b"),
            "nothing that is installed provides 'nexrl' of regress.modes",
        ),
    ],
)
def test_what_is_not_there_is_said_in_one_sentence(
    core: Core, arguments: tuple[str, ...], sentence: str
) -> None:
    assert sentence in core.refuses(*arguments)
