"""Fixtures of tests of foreign trainers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.foreign.foreign_project import ForeignProject


@pytest.fixture
def project(tmp_path: Path) -> ForeignProject:
    """A project with the case ``dense``."""
    return ForeignProject(tmp_path, "dense")
