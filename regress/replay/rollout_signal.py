"""Signal check of rollouts that a case samples: of completions that are all alike, a wrong sampler draws the same."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from regress.dump.trajectory import Trajectory
from regress.golden.golden_case import GoldenCase
from regress.replay.case_signal import SignalError, by_group


def require_rollout_signal(case: GoldenCase) -> None:
    """Raise `SignalError` listing what the rollouts of a case lack."""
    missing = [*check_rollouts(case.trajectories(), case.greedy(), _max_turns(case))]
    if missing:
        raise SignalError(
            f"""case {case.name!r} cannot become golden, because some faults of the sampler could not show in it:
            {"; ".join(missing)}: change its seed, its recipe or its configuration""",
            ["recipe.warm_steps", "data.max_completion_length"],
        )


def check_rollouts(
    drawn: dict[int, list[Trajectory]], greedy: dict[int, list[Trajectory]], turns: int
) -> Iterator[str]:
    """Yield a sentence for each missing signal.

    Args:
        drawn, greedy: completions by step.
        turns: completions that a conversation may have.
    """
    samples = [one for found in drawn.values() for one in found]
    best = [one for found in greedy.values() for one in found]
    for reason in ("stop", "length"):
        if all(one.finish_reason != reason for one in samples):
            yield f"no completion ends with finish_reason {reason!r}"
    if len({len(one.tokens) for one in samples}) < 2:
        yield "all samples are of equal length"
    if len({one.prompt_length for one in samples}) < 2:
        yield "all prompts are of equal length, so nothing is padded"
    if [one.tokens for one in samples] == [one.tokens for one in best]:
        yield "what is drawn is what is most probable"
    if len(drawn) < 2:
        yield "it has one step, so no rollout is sampled from updated weights"
    for found in drawn.values():
        if all(len({tuple(one.tokens) for one in group}) == 1 for group in by_group(found).values()):
            yield "the runs of each group are the same, so a shared stream would not show"
    if turns > 1 and not any(_inner(one) for one in samples):
        yield "no conversation has masked tokens of the environment between sampled ones"


def _inner(one: Trajectory) -> bool:
    """Return True if masked tokens lie between sampled ones."""
    return len([value for value, _ in groupby(one.loss_mask) if value]) > 1


def _max_turns(case: GoldenCase) -> int:
    task = case.config.get("task")
    turns = task.get("max_turns", 1) if isinstance(task, dict) else 1
    return turns if isinstance(turns, int) else 1
