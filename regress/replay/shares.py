"""Shares of a batch that data-parallel ranks have, of cases whose values depend on microbatches. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from regress.replay.one import Replay
from regress.replay.partition import depends_on_microbatches, depends_on_ranks, same_microbatches
from regress.replay.plan import PlannedUpdate, plan_replay
from regress.replay.read_once import trajectories_of
from regress.replay.traits import facts_of


def keeps_microbatches(replay: Replay) -> bool:
    """Return True unless the values of a case depend on its microbatches, and the variant makes others.

    Those that its ranks make of their shares are no others.
    """
    if not depends_on_microbatches(facts_of(replay.case).algorithm):
        return True
    return same_microbatches(planned(replay, shares(replay)), replay.plan)


def has_other_values(replay: Replay) -> bool:
    """Return True if the stored values of a case are not those of the data-parallel ranks of a replay."""
    algorithm = facts_of(replay.case).algorithm
    if not depends_on_microbatches(algorithm):
        return False
    stored = planned(replay, {})
    same_ranks = stored[0].ranks.mesh.data_size == replay.plan[0].ranks.mesh.data_size
    return not same_microbatches(stored, replay.plan) or (depends_on_ranks(algorithm) and not same_ranks)


def shares(replay: Replay) -> dict[str, Any]:
    """Return the overrides that deal samples out as a replay does, and split nothing else."""
    ranks = replay.plan[0].ranks
    return {"parallel.dp": ranks.mesh.data_size, "parallel.sample_split": ranks.sample_split}


def planned(replay: Replay, overrides: Mapping[str, Any]) -> list[PlannedUpdate]:
    return plan_replay(trajectories_of(replay.case), replay.case.config, overrides)
