"""Advantage rules that trainers use, as candidates: the value of each recorded token under each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from regress.explain.update_tokens import Floats, Ints, UpdateTokens

if TYPE_CHECKING:
    from regress.grpo.objective import Objective

EPSILONS = (1e-6, 0.0, 1e-8, 1e-5, 1e-4)
"""Constants beside the standard deviation that released trainers use (1e-9 cannot be told from 1e-8); the first is
tried first."""


@dataclass(frozen=True)
class Advantages:
    """One advantage rule and its values.

    Attributes:
        name: the rule in words.
        values: advantage of each token of the frame; NaN where the rule gives none.
        fields: the fields of an `Objective` that say the same, where it has such.
        eps: the constant beside the standard deviation, None without one.
    """

    name: str
    values: Floats
    fields: dict[str, Any] = field(default_factory=dict)
    eps: float | None = None


def candidates(update: UpdateTokens) -> list[Advantages]:
    """Return every rule that the dump has the values for: recorded advantages, or those that follow from rewards."""
    recorded = update.get("is_loss_debug/advantages")
    return of_rewards(update) if recorded is None else [Advantages("as recorded", recorded)]


def of_rewards(update: UpdateTokens) -> list[Advantages]:
    """Return every rule by which advantages follow from the recorded rewards; none without these."""
    if not update.trajectories:
        return []
    return [*_of_objective(update), *_of_samples(update), *_of_tokens(update)]


def constant(update: UpdateTokens) -> list[Advantages]:
    """Return the rule of supervised fine-tuning, which needs no rewards."""
    return [Advantages("1 for every sample", np.ones(update.frame.size), {"advantage": "constant"})]


def solved(update: UpdateTokens, recorded: Floats, tokens: Ints) -> Iterator[Advantages]:
    """Yield rules that divide by a deviation plus the constant with which they are nearest to recorded advantages."""
    own = recorded[tokens]
    for estimator, scale, ddof in product(_BASELINES, ("group", "batch"), (1, 0)):
        fields = {"advantage": estimator, "scale": scale, "ddof": ddof}
        parts = [_by_objective(update, fields | more) for more in ({"scale": "none"}, {"eps": 0.0})]
        if parts[0] is None or parts[1] is None:
            continue
        bare, divided = (_each(update, part)[tokens] for part in parts if part is not None)
        used = (divided != 0) & (own != 0)
        deviation = bare[used] / divided[used]
        size = float(own[used] @ own[used])
        eps = float(own[used] @ (bare[used] - own[used] * deviation)) / size if size else 0.0
        values = _by_objective(update, fields | {"eps": eps}) if eps > 0 else None
        if values is not None:
            words = f"{_BASELINES[estimator]}, {_SCALES[scale]} ({_deviation(ddof)})"
            yield Advantages(words, _each(update, values), fields | {"eps": eps}, eps)


def groups_of(update: UpdateTokens) -> Ints:
    """Return the number of the group of each trajectory: by its id, or by its prompt where every id stands alone."""
    names: list[object] = [trajectory.group_id for trajectory in update.trajectories]
    if len(set(names)) == len(names):
        names = [tuple(t.tokens[: t.prompt_length]) for t in update.trajectories]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.array([numbers[name] for name in names], np.int64)


def _rewards(update: UpdateTokens) -> Floats:
    return np.array([trajectory.reward for trajectory in update.trajectories], np.float64)


def _each(update: UpdateTokens, of_trajectory: Floats) -> Floats:
    return of_trajectory[update.rollout][update.sample]


_SCALES = {
    "group": "divided by the standard deviation of the group",
    "batch": "divided by the standard deviation of the batch",
    "none": "not divided",
}
_BASELINES = {
    "grpo": "reward minus the mean of the group",
    "rloo": "reward minus the mean of the others of the group",
    "grpo_passk": "best reward of the group minus the second best, for the best sample alone",
}


def _of_objective(update: UpdateTokens) -> Iterator[Advantages]:
    """Yield rules with one value per sample that an `Objective` can express."""
    for estimator, scale in product(_BASELINES, _SCALES):
        words = f"{_BASELINES[estimator]}, {_SCALES[scale]}"
        for ddof in (1, 0) if scale != "none" else (1,):
            kind = "" if scale == "none" else f" ({_deviation(ddof)})"
            for eps in EPSILONS if scale != "none" else (0.0,):
                fields = {"advantage": estimator, "scale": scale, "ddof": ddof, "eps": eps}
                values = _by_objective(update, fields)
                if values is None:
                    continue
                shown = {k: v for k, v in fields.items() if scale != "none" or k in ("advantage", "scale")}
                yield Advantages(words + kind, _each(update, values), shown, None if scale == "none" else eps)


def _deviation(ddof: int) -> str:
    return f"{'sample' if ddof else 'population'} deviation"


def _by_objective(update: UpdateTokens, fields: dict[str, Any]) -> Floats | None:
    """Return one advantage per trajectory, by the functions that our own trainer uses; None where they have none."""
    import torch

    from regress.grpo.advantage_computation import token_advantages
    from regress.grpo.argument_checks import InputError
    from regress.grpo.objective_presets import make_objective

    rewards = torch.from_numpy(_rewards(update))
    groups = torch.from_numpy(groups_of(update))
    each = torch.arange(len(rewards))
    try:
        return np.asarray(
            token_advantages(rewards, groups, each, make_objective(**fields)).numpy(), np.float64
        )
    except InputError:  # such as a group of one sample, which has no second best
        return None


def _of_samples(update: UpdateTokens) -> Iterator[Advantages]:
    """Yield rules with one value per sample that have no scale to choose."""
    rewards, groups = _rewards(update), groups_of(update)
    used = int(np.count_nonzero(rewards))
    lengths = np.array([sum(t.loss_mask) for t in update.trajectories], np.float64)
    rules: dict[str, Callable[[], Floats]] = {
        "the reward itself": lambda: rewards,
        "reward minus the mean of the batch": lambda: rewards - rewards.mean(),
        "reward minus the mean of the batch, divided by its sample deviation": lambda: (
            (rewards - rewards.mean()) / rewards.std(ddof=1)
        ),
        "reward minus the mean of the batch, divided by its population deviation": lambda: (
            (rewards - rewards.mean()) / rewards.std()
        ),
        "reward minus the mean of the group weighted by length (OPO)": lambda: (
            rewards - _per_group(groups, rewards * lengths) / _per_group(groups, lengths)
        ),
        "reward minus the mean of the others of the group, divided by their sample deviation": lambda: (
            _leave_one_out(rewards, groups)
        ),
    }
    if 0 < used < len(rewards):  # else the rule is that of the group's mean
        rules[
            "reward minus the mean of the group, times samples over those of a reward other than 0 (GPG)"
        ] = lambda: (
            (rewards - _per_group(groups, rewards) / np.bincount(groups)[groups]) * len(rewards) / used
        )
    for name, rule in rules.items():
        with np.errstate(all="ignore"):
            values = rule()
        if np.isfinite(values).all():
            fields = next(({"advantage": own} for word, own in _NAMED.items() if name.endswith(word)), {})
            yield Advantages(name, _each(update, values), fields)


_NAMED = {"(OPO)": "opo", "(GPG)": "gpg"}
"""Estimators of an `Objective` among the rules of samples, by the end of their words."""


def _per_group(groups: Ints, values: Floats) -> Floats:
    return np.asarray(np.bincount(groups, values)[groups], np.float64)


def _leave_one_out(rewards: Floats, groups: Ints) -> Floats:
    """Return NeMo-RL's default: mean and deviation of the other samples; 0 where these are equal."""
    out = np.zeros_like(rewards)
    for i, reward in enumerate(rewards):
        others = np.delete(rewards[groups == groups[i]], np.flatnonzero(groups == groups[i]).searchsorted(i))
        if len(others) < 2:
            return np.full_like(rewards, np.nan)
        spread = others.std(ddof=1)
        out[i] = (reward - others.mean()) / (spread + 1e-6) if spread > 0 else reward - others.mean()
    return out


def _of_tokens(update: UpdateTokens) -> Iterator[Advantages]:
    """Yield rules that whiten over the loss tokens of the rollout batch."""
    from regress.grpo.objective_presets import make_objective

    for (words, chosen), ddof in product(_WHITENED.items(), (1, 0)):
        for eps in EPSILONS if "scale" in chosen else (0.0,):
            fields: dict[str, Any] = {**chosen, "ddof": ddof} | ({"eps": eps} if "scale" in chosen else {})
            values = by_tokens(update, make_objective(**fields))
            name = f"{words}, whitened over tokens ({_deviation(ddof)})"
            yield Advantages(name, values, fields, fields.get("eps"))


def by_tokens(update: UpdateTokens, objective: Objective) -> Floats:
    """Return the advantage of each loss token under an objective, by the functions that our own trainer uses.

    Raises:
        InputError: if the objective asks for more than rewards.
    """
    import torch

    from regress.grpo.advantage_computation import token_advantages

    masks = [np.flatnonzero(t.loss_mask) for t in update.trajectories]
    sequence = np.repeat(np.arange(len(masks)), [len(mask) for mask in masks]).astype(np.int64)
    rewards, groups, places = map(torch.from_numpy, (_rewards(update), groups_of(update), sequence))
    found = token_advantages(rewards, groups, places, objective).numpy()
    values = np.full(update.frame.size, np.nan)
    for number, trajectory in enumerate(update.rollout):
        own = update.frame.offsets[number] + masks[trajectory]
        inside = own < update.frame.offsets[number + 1]
        values[own[inside]] = found[sequence == trajectory][inside]
    return values


_WHITENED: dict[str, dict[str, Any]] = {
    "reward": {"advantage": "reinforce_plus_plus"},
    _BASELINES["grpo"]: {"advantage": "reinforce_plus_plus_baseline"},
    f"{_BASELINES['grpo']}, {_SCALES['group']}": {"advantage": "gdpo", "scale": "group"},
}
"""Rules that are whitened over tokens, in words and as fields of an `Objective`."""
