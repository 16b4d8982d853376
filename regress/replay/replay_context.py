"""Replay as the diagnosis rules see it: its mesh, samples and configuration, and commands that work here."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from regress.compare.diagnosis.run_context import RunContext
from regress.replay.test_matrix import Replay
from regress.replay.variant import Precision


def run_context_of(replay: Replay, config: Mapping[str, Any] | None = None) -> RunContext:
    """Return the run of a replay.

    Args:
        config: the whole configuration that it ran with, defaults included; by default what the case says.
    """
    known = dict(config if config is not None else replay.case.config)
    frames = [update.frame for update in replay.plan]
    groups: dict[tuple[int, str], int] = {}
    for number, frame in enumerate(frames):
        for group, _ in frame.samples:
            groups[number, group] = groups.get((number, group), 0) + 1
    mesh = replay.plan[0].ranks.mesh if replay.plan else None
    return RunContext(
        world_size=replay.world_size,
        micros=max((len(own) for update in replay.plan for own in update.layouts), default=None),
        mesh={} if mesh is None else dict(mesh.sizes),
        group_sizes=tuple(sorted(set(groups.values()))),
        config=known,
        commands=commands(replay),
    )


def commands(replay: Replay) -> dict[str, str]:
    """Return the commands for a closer look at a replay."""
    case, tier = shlex.quote(replay.case.name), "bitwise" if replay.precision is Precision.BITWISE else "all"
    again = f"regress replay {case} --variants {{variants}} --tier {tier}"
    kept = "--keep-dumps dumps"
    return {
        "replay": again,
        "variant": replay.variant.name,
        "test": f"pytest -k '{replay.name}/ and {{quantity}}'",
        "show": (
            f"regress replay {case} --variants {shlex.quote(replay.variant.name)} {kept} && "
            f"regress dump show dumps/{replay.name}/dump/{{record_type}}"
        ),
    }
