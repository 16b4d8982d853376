"""The makers of dumps stand beside the tests that use them, and what every engine must find."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from regress.compare.dumps.comparison import compare_dumps

sys.path.append(str(Path(__file__).parent))


@pytest.fixture(scope="module")
def expected(pair: tuple[str, str]) -> list[object]:
    """The verdicts of this process alone on the ``pair`` of a module, as plain trees."""
    verdicts = [verdict.to_json() for verdict in compare_dumps(*pair).verdicts]
    assert {verdict["status"] for verdict in verdicts} >= {"ok", "drift"}
    return verdicts
