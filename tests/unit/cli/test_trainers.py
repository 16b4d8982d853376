"""Trainers and checks before a resume, as other packages register them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from click.testing import CliRunner

from regress import plugins
from regress.cli import main

Register = Callable[..., None]
TRAINER = """
from pathlib import Path
from regress.engine.training_run import RunResult
from regress.errors import CheckpointError

def train(config, console, *, allow_change, before_resume, earlier):
    before_resume()
    print(f"{config.trainer.type} trains {config.max_steps} steps, {earlier}, {allow_change}")
    return RunResult(Path("out"), None, {}, {}, main=False)

def check(config, console, allowed):
    raise CheckpointError(f"nobody goes on with {config.max_steps} steps")
"""


@pytest.fixture
def register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Register]:
    """``register(group={"name": "module:attribute"})``: the only entry points that are installed."""
    (tmp_path / "a_trainer.py").write_text(TRAINER)
    monkeypatch.syspath_prepend(tmp_path)

    def install(**groups: dict[str, str]) -> None:
        monkeypatch.setattr(
            plugins,
            "entry_points",
            lambda group: [EntryPoint(*item, group) for item in groups.get(group.split(".")[1], {}).items()],
        )
        plugins.registered.cache_clear()

    yield install
    plugins.registered.cache_clear()
    sys.modules.pop("a_trainer", None)


def test_a_trainer_of_somebody_else_is_chosen_by_its_type(register: Register) -> None:
    register(trainers={"mine": "a_trainer:train"})
    found = CliRunner().invoke(main, ["train", "trainer.type=mine", "max_steps=3", "--allow-change", "seed"])
    assert found.exit_code == 0, found.output
    assert found.output == "mine trains 3 steps, refuse, ('seed',)\n"


def test_its_type_is_none_where_nobody_registers_it(register: Register) -> None:
    register()
    found = CliRunner().invoke(main, ["train", "trainer.type=mine"])
    assert found.exit_code == 2
    assert "trainer.type=mine (command line) must be one of local, remote" in found.output


def test_a_check_of_somebody_else_can_refuse_to_go_on(register: Register) -> None:
    register(trainers={"mine": "a_trainer:train"}, resume_checks={"mine": "a_trainer:check"})
    found = CliRunner().invoke(main, ["train", "trainer.type=mine", "max_steps=3"])
    assert found.exit_code == 2
    assert found.output == "error: nobody goes on with 3 steps\n"


def test_a_trainer_whose_package_is_gone_is_named(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "_is_there", lambda point: "service" not in point.value)
    register()
    found = CliRunner().invoke(main, ["train", "trainer.type=remote"])
    assert found.exit_code == 2
    assert (
        "error: nothing that is installed provides 'remote' of regress.trainers (there is local): install the package "
        "that registers it" in found.output
    )
