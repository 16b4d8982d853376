"""Preparation of updates of golden cases."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from regress.golden.case_update import commit
from regress.golden.golden_case import GoldenCase
from regress.replay.drift_update import _copy, _selected


def test_the_copy_of_a_write_protected_case_can_be_changed(case: GoldenCase, tmp_path: Path) -> None:
    target = tmp_path / "staged" / "dense"
    for folder, _, files in os.walk(case.folder, topdown=False):
        for name in files:
            (Path(folder) / name).chmod(0o444)
        Path(folder).chmod(0o555)
    try:
        _copy(case.folder, target)
    finally:
        for folder, *_ in os.walk(case.folder):
            Path(folder).chmod(0o755)
    folders = [Path(folder) for folder, *_ in os.walk(target)]
    assert len(folders) > 5
    assert all(folder.stat().st_mode & stat.S_IWUSR for folder in folders)  # root may write anywhere
    assert case.manifest is not None
    commit(target, truth={"step_000000": {"kl": None}}, provenance=case.manifest.provenance)


def test_what_a_killed_process_left_is_replaced(case: GoldenCase, tmp_path: Path) -> None:
    left = tmp_path / "dense" / "truth" / "half"
    left.mkdir(parents=True)
    _copy(case.folder, tmp_path / "dense")
    assert not left.exists()
    assert GoldenCase(tmp_path / "dense").manifest == case.manifest


def test_a_new_quantity_belongs_to_the_coverage_of_its_update(case: GoldenCase) -> None:
    assert _selected(case, {("step_000000", "kl")}, "step_000000", "kl")
    assert not _selected(case, {("step_000000", "kl")}, "step_000001", "kl")
    assert not _selected(case, {("step_000000", "coverage")}, "step_000000", "kl")
    assert _selected(case, {("step_000000", "coverage")}, "step_000000", "brand_new")
    assert not _selected(case, {("step_000001", "coverage")}, "step_000000", "brand_new")
    assert _selected(case, {("step_000009", "coverage")}, "step_000009", "kl")
