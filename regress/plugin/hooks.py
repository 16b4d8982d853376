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


@pytest.hookspec
def pytest_regress_keywords(config: pytest.Config) -> Iterable[str]:  # type: ignore[empty-body]  # a specification
    """Name the markers and keywords that hooks of this conftest.py may add to tests of golden cases.

    A conftest.py that changes collected tests (``pytest_collection_modifyitems`` and the like) should say so: without
    it ``-k`` and ``-m`` cannot be applied before all tests of golden cases are made, which takes longer. What its hooks
    do with one of these tests must not depend on which others there are.
    """
