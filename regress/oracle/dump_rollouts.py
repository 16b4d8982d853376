"""Rollouts of a dump: the samples that were drawn together, and the updates that train on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from regress.dump.coordinates import Place
from regress.dump.trajectory import Trajectory
from regress.explain.update_tokens import Floats, UpdateTokens


@dataclass
class Rollout:
    """Samples that were drawn together.

    Attributes:
        began: place of the first update that trains on them; None before there is one.
        old: log-probs before that update by number of the sample, ``[S]``, NaN where there are none: as the trainer
            recorded them in a pass of their own, else in the forward pass of that update.
    """

    samples: Sequence[Trajectory]
    began: Place | None = None
    old: dict[int, Floats] = field(default_factory=dict)

    def holds(self, others: Sequence[Trajectory]) -> bool:
        """Return True if trajectories are all among the samples, by tokens and reward."""
        return _contents(others) <= _contents(self.samples)

    def numbers(self, tokens: tuple[int, ...]) -> list[int]:
        """Return the numbers of the samples with these tokens."""
        return [number for number, sample in enumerate(self.samples) if tuple(sample.tokens) == tokens]


@dataclass
class Rollouts:
    """Rollouts in the order in which they were tapped last."""

    known: list[Rollout] = field(default_factory=list)

    def tap(self, tapped: Sequence[Trajectory]) -> None:
        """Take the trajectories of a step: a new rollout, or the one that was tapped at an earlier step, too."""
        if not tapped:
            return
        same = next((one for one in reversed(self.known) if one.holds(tapped)), None)
        if same is not None:
            self.known.remove(same)
        self.known.append(same or Rollout(tapped))

    def of(
        self, tokens: UpdateTokens, ids: Sequence[tuple[int, ...]]
    ) -> tuple[Rollout, list[int], list[int] | None] | None:
        """Return the rollout that an update trains on, the number in it of each sample, and that in the frame.

        The latter is None where the tokens are others than were sampled; the comparison then says which.
        """
        for rollout in reversed(self.known):
            found = _matched(tokens, ids, rollout.samples)
            if found is not None:
                return rollout, [*found.values()], [*found]
            if rollout is self.known[-1] and len(rollout.samples) == len(ids):
                return rollout, [*range(len(ids))], None
        return None


def _contents(samples: Sequence[Trajectory]) -> Counter[tuple[tuple[int, ...], float]]:
    return Counter((tuple(sample.tokens), sample.reward) for sample in samples)


def _matched(
    tokens: UpdateTokens, ids: Sequence[tuple[int, ...]], rollout: Sequence[Trajectory]
) -> dict[int, int] | None:
    """Return the trajectory of each sample: by key, else by tokens; of a repeated sample the first has one."""
    keys = {trajectory.key: index for index, trajectory in enumerate(rollout)}
    if all(
        key in keys and tuple(rollout[keys[key]].tokens) == own
        for key, own in zip(tokens.frame.samples, ids, strict=True)
    ):
        return {number: keys[key] for number, key in enumerate(tokens.frame.samples)}
    free: dict[tuple[int, ...], list[int]] = {}
    for index, trajectory in enumerate(rollout):
        free.setdefault(tuple(trajectory.tokens), []).append(index)
    found: dict[int, int] = {}
    for number, own in enumerate(ids):
        if own not in free:
            return None
        if free[own]:  # else a copy, such as one that fills up a batch
            found[number] = free[own].pop(0)
    return found
