"""Provenance of a recording, and the differences that are worth a line."""

from __future__ import annotations

import copy
import subprocess
from pathlib import Path
from typing import Any

import pytest

from regress.golden.provenance import collect, differences, told


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "n")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "e@example.org")
    (tmp_path / "code.py").write_text("x = 1\n")
    (tmp_path / "golden").mkdir()
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "m"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    return tmp_path


def source(folder: Path) -> Any:
    return collect({}, source=folder, golden=folder / "golden")["source"]


def test_source(repository: Path) -> None:
    clean = source(repository)
    assert len(clean["revision"]) == 40
    assert clean["dirty"] is False
    (repository / "golden" / "x").write_text("a golden is what is being made")
    assert source(repository) == clean
    (repository / "code.py").write_text("x = 2\n")
    assert source(repository) == clean | {"dirty": True}


def test_a_new_module_makes_the_source_dirty(repository: Path) -> None:
    (repository / "sub").mkdir()
    (repository / "new.py").touch()
    assert source(repository / "sub")["dirty"] is True


def test_a_golden_directory_elsewhere(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    found = collect({}, source=repository, golden=tmp_path_factory.mktemp("golden"))
    assert found["source"]["dirty"] is False  # type: ignore[index,call-overload]  # a mapping


def test_outside_of_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert source(tmp_path) == {"revision": None, "dirty": None}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert source(tmp_path) == {"revision": None, "dirty": None}


def test_threads_in_force_stand_for_the_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    found: Any = collect({"a": 1}, threads=2, processor="AVX2", source=tmp_path)
    assert found["environment"]["variables"] == {"ATEN_CPU_CAPABILITY": "avx2"}
    assert (found["environment"]["threads"], found["environment"]["processor"]) == (2, "AVX2")
    assert found["config_sha256"] == collect({"a": 1}, source=tmp_path)["config_sha256"]
    assert found["config_sha256"] != collect({"a": 2}, source=tmp_path)["config_sha256"]


def test_only_what_changes_arithmetic_differs(tmp_path: Path) -> None:
    then: Any = collect({}, threads=1, source=tmp_path)
    then["versions"] |= {"torch": "2.12.0", "numpy": "2.1"}
    assert differences(then, copy.deepcopy(then)) == []
    now = copy.deepcopy(then)
    now["versions"] |= {"torch": "2.13.0", "numpy": "2.2", "python": "4"}
    now["environment"] |= {"threads": 2, "variables": {"NCCL_ALGO": "Ring"}, "processor": "AVX2"}
    now |= {"config_sha256": "0" * 64, "source": {"revision": "x", "dirty": True}}
    assert differences(then, now) == [
        "recorded with torch 2.12.0, now 2.13.0",
        "recorded with threads 1, now 2",
        "recorded with processor (not known), now AVX2",
        "recorded with NCCL_ALGO (not set), now Ring",
    ]


def test_a_reader_is_told_what_is_known() -> None:
    now = {
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "environment": {
            "system": "Linux",
            "machine": "x86_64",
            "processor": None,
            "device": "cpu",
            "threads": 2,
            "variables": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        },
        "source": {"revision": "0123456789abcdef", "dirty": True},
    }
    assert told(now) == {
        "versions": "python 3.11.7, torch 2.13.0",
        "machine": "Linux, x86_64, cpu, 2 threads",
        "variables": "CUBLAS_WORKSPACE_CONFIG=:4096:8",
        "source": "0123456789ab with changes",
    }
    assert told({"environment": {"threads": 1}, "source": {"revision": None}}) == {"machine": "1 thread"}


def test_a_provenance_of_somebody_else() -> None:
    assert differences({}, {}) == []
    del_torch = {"versions": {"torch": "2.12"}}
    assert differences(del_torch, {}) == ["recorded with torch 2.12, now (not installed)"]
