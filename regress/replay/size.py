"""Number of ranks of a replay, known without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from regress.errors import ConfigError
from regress.replay.plan import section

DIMENSIONS = ("pp", "dp", "fsdp", "ep", "cp", "tp")


def mesh_sizes(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, int]:
    """Return the dimensions of the mesh that are larger than one; raises `ConfigError` for an invalid size."""
    values = section(config, overrides, "parallel")
    found = {}
    for name in DIMENSIONS:
        size = values.get(name, 1)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(
                f"parallel.{name} is {size!r}, but a dimension has a whole number of ranks; give 1 or more"
            )
        if size > 1:
            found[name] = size
    return found


def world_size(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> int:
    """Return the number of ranks of a case's configuration under overrides by dotted key."""
    return math.prod(mesh_sizes(config, overrides).values())
