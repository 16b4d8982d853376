"""Hooks that a conftest.py may implement."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from regress.replay.variants import Variant


@pytest.hookspec
def pytest_regress_variants(config: pytest.Config) -> Iterable[Variant]:  # type: ignore[empty-body]  # a specification
    """Further variants under which golden cases are replayed (`regress.replay.variants.Variant`)."""
