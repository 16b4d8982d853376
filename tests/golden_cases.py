"""Golden cases of this repository, each opened once for all tests of a process."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from regress.golden.golden_case import GoldenCase
from regress.golden.golden_directory import GoldenStore

STORE = GoldenStore(Path(__file__).parents[1] / "golden")


@cache
def opened(name: str) -> GoldenCase:
    """Return a case."""
    return STORE.case(name)


def cases() -> list[GoldenCase]:
    """Return all cases, in the order of their names."""
    return [opened(name) for name in STORE.names()]
