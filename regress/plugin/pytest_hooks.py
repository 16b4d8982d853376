"""Hooks that a conftest.py may implement."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from regress.replay.variant import Precision, Variant


@pytest.hookspec
def pytest_regress_variants(config: pytest.Config) -> Iterable[Variant]:  # type: ignore[empty-body]  # a specification
    """Return further variants under which golden cases are replayed (`regress.replay.variant.Variant`)."""


@pytest.hookspec(firstresult=True)
def pytest_regress_replay(case: Path, variant: Variant, precision: Precision, folder: Path) -> object:
    """Replay an exported golden case by your own trainer; called on every rank, in a process of its own.

    If a conftest.py or plugin implements it, your trainer runs all replays of the session: the tests keep
    their names, without rank and microbatch, which are left to your trainer. There may be one implementation,
    a function of a module.

    Args:
        case: folder of the export (``regress golden export``); its README.md explains every file.
        variant: name and configuration overrides (`regress.replay.variant.Variant`), such as the mesh; the process
            group has as many ranks as it asks for.
        precision: precision to compute in: ``float64``, ``float32``, ``bfloat16`` or ``mixed``.
        folder: folder for the dump, which does not exist yet.

    Raises:
        NotSupported: with the reason, on every rank and before any communication, for a variant that you do not have.
    """


@pytest.hookspec
def pytest_regress_keywords(config: pytest.Config) -> Iterable[str]:  # type: ignore[empty-body]  # a specification
    """Do nothing: deprecated, as ``-k`` and ``-m`` see all markers and keywords without it; it will be removed."""
