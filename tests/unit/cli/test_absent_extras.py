"""Leave out what needs an absent extra, with the command that installs it, unless it was asked for by name."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from regress.cli import main

GOLDEN = Path(__file__).parents[3] / "golden"
SERVICE = (
    "it needs fastapi, httpx, protobuf, uvicorn, zstandard, which are not installed; run pip install "
    "'fastapi>=0.115' 'httpx>=0.27' 'protobuf>=6.30' 'uvicorn>=0.34' 'zstandard>=0.23'"
)
LORA = "it needs peft, which is not installed; run pip install 'peft>=0.17'"
ABSENT = {"fastapi", "httpx", "protobuf", "uvicorn", "zstandard", "peft"}


@pytest.fixture(autouse=True)
def without_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    known = metadata.version

    def version(name: str) -> str:
        if name in ABSENT:
            raise metadata.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(metadata, "version", version)


def replay(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["replay", *arguments, "--golden-dir", str(GOLDEN)])


def test_replays_that_need_an_absent_extra_are_not_supported() -> None:
    """A case with adapters ended the whole matrix with exit code 2 where peft was not installed."""
    result = replay("dr_gr*", "lor*", "--variants", "base,remote-weaver", "--matrix", "full")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert any(line.startswith("1 replay, ") and line.endswith("all within tolerance") for line in lines)
    assert f"not supported: lora/base, lora/remote-weaver: {LORA}" in lines
    assert f"not supported: dr_grpo/remote-weaver: {SERVICE}" in lines


def test_a_case_that_was_asked_for_by_name_has_to_be_judged() -> None:
    result = replay("dr_grpo", "lora", "--variants", "base")
    assert result.exit_code == 2, result.output
    assert f"lora/base cannot be replayed: {LORA}" in result.output
    assert "1 replay could not be judged" in result.output
