"""Environments of systems: what is installed has to import before it counts as installed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from regress.errors import SystemsError
from regress.systems import system_environments
from regress.systems.protocol import System
from regress.systems.system_environments import environment_of, install


class Made(System):
    name, version_of = "made", "made-up"
    requirements = ("made-up==1.0",)
    modules = ("made_up",)


SYSTEM: Any = Made()  # what is installed and imported is asked of it, nothing else


def wheel(folder: Path, code: str) -> None:
    """Write the wheel of made-up 1.0, a package of one module."""
    files: Mapping[str, str] = {
        "made_up.py": code,
        "made_up-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: made-up\nVersion: 1.0\n",
        "made_up-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "made_up-1.0.dist-info/RECORD": "",
    }
    with ZipFile(folder / "made_up-1.0-py3-none-any.whl", "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of wheels that pip and uv take packages from, and no others."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for tool in ("PIP", "UV"):
        monkeypatch.setenv(f"{tool}_NO_INDEX", "1")
        monkeypatch.setenv(f"{tool}_FIND_LINKS", str(folder))
    monkeypatch.setenv(system_environments.VARIABLE, str(tmp_path / "systems"))
    return folder


def test_a_system_that_lacks_a_package_is_not_installed(index: Path) -> None:
    wheel(index, "import nothing_of_this_name\n")
    with pytest.raises(
        SystemsError,
        match=r"made is installed and cannot be imported .*No module named 'nothing_of_this_name'.*correct the pins",
    ):
        install(SYSTEM)
    with pytest.raises(SystemsError, match="made is not installed: run regress systems install made"):
        environment_of(SYSTEM)
    assert not list((index.parent / "systems").glob("made-*/"))


def test_a_system_that_imports_is_installed(index: Path) -> None:
    wheel(index, "import json\n")
    made = install(SYSTEM)
    assert made.installed == ("made-up==1.0",)
    assert environment_of(SYSTEM) == made
