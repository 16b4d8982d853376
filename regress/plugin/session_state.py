"""State that the fixtures and the reports of a session share with its hooks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest

if TYPE_CHECKING:
    from regress.plugin.golden_update import StagedValues
    from regress.plugin.replay_suite import Suite


class SessionState(Protocol):
    """One process of a session."""

    @property
    def replays(self) -> Path | None:
        """Directory of this session's replays, if it has any."""

    def staged_values(self, item: pytest.Item) -> StagedValues:
        """Return the staging folder for the new goldens of one run of a test."""

    def suite(self) -> Suite:
        """Return the cases and variants; raises `ConfigError` for bad ones."""


SESSION = pytest.StashKey[SessionState]()


def owner(node: pytest.Item) -> str:
    """Return the id of a test, without the group that pytest-xdist may add to its `nodeid`."""
    return node.nodeid if node.parent is None else f"{node.parent.nodeid}::{node.name}"
