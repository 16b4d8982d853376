"""Targets of ranks, importable as a user's are."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def targets() -> Iterator[object]:
    """The module of targets, importable as a user's is."""
    sys.path.insert(0, str(HERE))
    try:
        import rank_targets

        yield rank_targets
    finally:
        sys.path.remove(str(HERE))
