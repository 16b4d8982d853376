"""A small run on disk, and the command."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from regress.cli import main
from tests.unit.doctor.builder import Run

OF_THE_CALLER = ("REGRESS_", "WANDB_", "ATEN_", "NCCL_", "EXPERIMENT_PATH", "DETERMINISTIC_MODE")


@pytest.fixture(autouse=True)
def _no_variables_of_the_caller(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(OF_THE_CALLER):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


@pytest.fixture
def doctor() -> Callable[..., Result]:
    def invoke(*arguments: object, **environ: str) -> Result:
        result = CliRunner().invoke(main, ["doctor", *map(str, arguments)], env=environ)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke
