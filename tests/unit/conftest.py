"""Fewer examples of properties by default: those that name no number of their own."""

from __future__ import annotations

import pytest
from hypothesis import settings

EXAMPLES = 30
"""New ones in every run; the extended run draws hypothesis's 100."""

settings.register_profile(
    "brief", parent=settings.get_profile(settings.get_current_profile_name()), max_examples=EXAMPLES
)


def pytest_configure(config: pytest.Config) -> None:
    """Draw all examples where extended tests run, too, and those of a profile that was asked for."""
    all_of_them = config.getoption("--extended") or "extended" in (config.getoption("-m") or "")
    if not (all_of_them or config.getoption("--hypothesis-profile")):
        settings.load_profile("brief")
