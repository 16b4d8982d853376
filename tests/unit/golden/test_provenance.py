"""Provenance of a recording, and the differences that are worth a line."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from regress.golden.golden_provenance import collect, differences, environment_lines


def test_threads_in_force_stand_for_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    found: Any = collect({"a": 1}, threads=2, processor="AVX2")
    assert found["environment"]["variables"] == {"ATEN_CPU_CAPABILITY": "avx2"}
    assert (found["environment"]["threads"], found["environment"]["processor"]) == (2, "AVX2")
    assert found["config_sha256"] == collect({"a": 1})["config_sha256"]
    assert found["config_sha256"] != collect({"a": 2})["config_sha256"]


def test_only_what_changes_arithmetic_differs() -> None:
    then: Any = collect({}, threads=1)
    then["versions"] |= {"torch": "2.12.0", "numpy": "2.1"}
    assert differences(then, copy.deepcopy(then)) == []
    now = copy.deepcopy(then)
    now["versions"] |= {"torch": "2.13.0", "numpy": "2.2", "python": "4"}
    now["environment"] |= {"threads": 2, "variables": {"NCCL_ALGO": "Ring"}, "processor": "AVX2"}
    now |= {"config_sha256": "0" * 64}
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
    }
    assert environment_lines(now) == {
        "versions": "python 3.11.7, torch 2.13.0",
        "machine": "Linux, x86_64, cpu, 2 threads",
        "variables": "CUBLAS_WORKSPACE_CONFIG=:4096:8",
    }
    assert environment_lines({"environment": {"threads": 1}}) == {"machine": "1 thread"}


def test_a_provenance_of_somebody_else() -> None:
    assert differences({}, {}) == []
    del_torch = {"versions": {"torch": "2.12"}}
    assert differences(del_torch, {}) == ["recorded with torch 2.12, now (not installed)"]
