"""A golden case of one's own: a copy that a test may change."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from regress.golden.case import GoldenCase
from regress.golden.store import GoldenStore

GOLDEN = Path(__file__).parents[3] / "golden"


@pytest.fixture
def store(tmp_path: Path) -> GoldenStore:
    """The case `dense`, alone in a golden directory."""
    shutil.copytree(GOLDEN / "dense", tmp_path / "golden" / "dense")
    return GoldenStore(tmp_path / "golden")


@pytest.fixture
def case(store: GoldenStore) -> GoldenCase:
    return store.case("dense")
