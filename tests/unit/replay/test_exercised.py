"""Every setting of the computation, and every pair that one function reads, is met by a case or variant."""

from __future__ import annotations

from pathlib import Path

import pytest

from regress.golden.store import GoldenStore
from regress.replay.exercised import Unexercised, unexercised
from regress.replay.table import project_variants

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def found() -> Unexercised:
    store = GoldenStore(ROOT / "golden")
    return unexercised([store.case(name) for name in store.names()], project_variants(ROOT))


EXCEPTIONS: dict[str, tuple[str, ...]] = {}
"""Rule that forbids them -> settings and pairs that nothing exercises."""


def test_everything_that_is_possible_is_exercised(found: Unexercised) -> None:
    assert found.lines() == []
