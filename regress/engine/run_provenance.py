"""Provenance of a run in its dumps, and the part of it that a replay must share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from regress.dump.dump_manifest import Provenance, environment
from regress.engine.config import to_plain
from regress.engine.config.config_schema import Config
from regress.layout import Mesh

_SUPERSEDED = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables made irrelevant by the number of threads in force, which is recorded too."""


def provenance(config: Config, tokenizer: str | None, mesh: Mesh | None = None) -> Provenance:
    """Return configuration, versions, determinism environment, tokenizer fingerprint (if any) and ranks of a run."""
    ranks = mesh or Mesh()
    found = environment(config.device, config.threads)
    found["variables"] |= config.system_envs  # a variable set for a run is assumed to matter
    return Provenance(
        config=to_plain(config),
        environment=found,
        tokenizer={} if tokenizer is None else {"fingerprint": tokenizer},
        mesh={"world_size": ranks.world_size, **(ranks.sizes if ranks.world_size > 1 else {})},
    )


def settings(found: Provenance) -> dict[str, Any]:
    """Return the settings that can change a bit of the arithmetic: variables, device, threads."""
    variables: Mapping[str, str] = found.environment["variables"]
    kept = {name: value for name, value in variables.items() if name not in _SUPERSEDED}
    return {**kept, "device": found.environment["device"], "threads": found.environment["threads"]}


def trajectory_meta(found: Provenance) -> dict[str, Any]:
    """Return the metadata stored with recorded trajectories, so that a single file can be checked too."""
    return {"tokenizer": found.tokenizer.get("fingerprint"), "environment": settings(found)}
