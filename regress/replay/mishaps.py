"""Mishaps of recorded rollouts: what other people's rollout workers return, and ours does not."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from regress.dump.trajectory import Trajectory
from regress.engine.rollout import Prompt

REPEATED, EQUAL, LONE, UNTOLD = "repeated_prompt", "equal_rewards", "lone_sample", "untold_temperature"

MISHAPS: Mapping[str, str] = {
    REPEATED: "the second group of a step has the prompt of the first",
    EQUAL: "the samples of the first group have the same reward, whose mean is another number",
    LONE: "the first group of a step has only its longest sample",
    UNTOLD: "nobody says at which temperature the samples were drawn",
}


REWARD = 0.1
"""Reward of three equal samples whose mean is 0.10000000000000002."""


def asked(prompts: Sequence[Prompt], mishaps: Collection[str]) -> list[Prompt]:
    """Return the prompts of a step as they are asked for."""
    found = list(prompts)
    if REPEATED in mishaps:
        found[1] = replace(found[0], group_id=found[1].group_id)
    return found


def returned(trajectories: Sequence[Trajectory], mishaps: Collection[str]) -> list[Trajectory]:
    """Return the samples of a step as they come back."""
    found = list(trajectories)
    if EQUAL in mishaps:
        first = found[0].group_id
        found = [_rewarded(one, REWARD) if one.group_id == first else one for one in found]
    if UNTOLD in mishaps:
        found = [replace(one, temperature=None) for one in found]
    if LONE in mishaps:
        group = [one for one in found if one.group_id == found[0].group_id]
        lone = max(group, key=lambda one: len(one.tokens))
        found = [one for one in found if one.group_id != lone.group_id or one is lone]
    return found


def _rewarded(sample: Trajectory, reward: float) -> Trajectory:
    return replace(sample, reward=reward, rewards=dict.fromkeys(sample.rewards, reward))
