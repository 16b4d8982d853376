"""Provenance of stored checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

_FOUND = pytest.StashKey[Mapping[str, Any]]()


def provenance_of(config: pytest.Config) -> Mapping[str, Any]:
    """Return versions and environment, computed once per session.

    It is the same on every worker, whatever tests have run there before: so it omits threads and processor,
    which only an already loaded torch would know.
    """
    if _FOUND not in config.stash:
        from regress.golden.golden_provenance import collect

        found = collect({})
        config.stash[_FOUND] = {key: value for key, value in found.items() if key != "config_sha256"}
    return config.stash[_FOUND]
