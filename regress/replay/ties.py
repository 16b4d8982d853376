"""Equal samples of a group between which rounding decides, and layouts that compute them alike. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from regress.dump.trajectory import Trajectory
from regress.replay.one import Replay
from regress.replay.plan import PlannedUpdate
from regress.replay.read_once import trajectories_of
from regress.replay.traits import facts_of


def keeps_ties(replay: Replay) -> bool:
    """Return False if the best of a group may be another one only because equal samples are computed apart.

    Rewards that hold a divergence are as exact as log-probs. Those of equal samples are the same bit for bit where both
    lie at the same columns of one microbatch, and differ by rounding elsewhere.
    """
    algorithm = facts_of(replay.case).algorithm
    if algorithm.get("advantage") != "grpo_passk" or algorithm.get("kl_placement") != "reward":
        return True
    steps = trajectories_of(replay.case)
    return all(
        _places(update, one) == _places(update, other)
        for update in replay.plan
        for one, other in _equal(update, steps[update.step])
    )


def _equal(update: PlannedUpdate, trajectories: list[Trajectory]) -> Iterator[tuple[int, int]]:
    """Yield the pairs of samples of an update that are equal, and of one group."""
    known = {one.key: one for one in trajectories}
    samples = [known[key] for key in update.frame.samples]
    for (first, one), (second, other) in combinations(enumerate(samples), 2):
        if (one.group_id, one.tokens, one.reward) == (other.group_id, other.tokens, other.reward):
            yield first, second


def _places(update: PlannedUpdate, sample: int) -> set[tuple[int, int, int, int]]:
    """Return the rank, microbatch, columns and first position of each piece of a sample."""
    return {
        (rank, micro, segment.col, segment.start)
        for rank, own in enumerate(update.layouts)
        for micro, layout in enumerate(own)
        for segment in layout.whole.segments
        if segment.sample == sample
    }
