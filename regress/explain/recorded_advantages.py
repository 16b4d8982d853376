"""Recorded advantages beside recorded rewards: the formulas that give one from the other, or that none does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from regress.errors import RegressError
from regress.explain.advantage_candidates import Advantages, by_tokens, groups_of, of_rewards, solved
from regress.explain.update_tokens import Floats, Ints, UpdateTokens
from regress.grpo.objective_catalogue import ADVANTAGES
from regress.grpo.objective_presets import make_objective

if TYPE_CHECKING:
    from regress.grpo.objective import Objective

COARSE = {"bfloat16": 2e-2, "float16": 2e-3}
"""Relative error of advantages that were recorded in a coarse dtype."""
SHOWN = 3
"""Most samples that a sentence names."""


def configured(update: UpdateTokens) -> Objective | None:
    """Return the objective that the run's own configuration names; None where it names none."""
    settings = update.config.get("algorithm")
    if not isinstance(settings, dict):
        return None
    try:
        return make_objective(**settings)
    except (RegressError, TypeError):
        return None


def named(update: UpdateTokens, tokens: Ints, tolerance: float) -> list[Advantages]:
    """Return rules that give the recorded advantages of some tokens; none without rewards."""
    recorded, tokens = update.get("is_loss_debug/advantages"), _in_the_loss(update, tokens)
    if recorded is None or not update.trajectories:
        return []
    own = recorded[tokens]
    limit = tolerance * float(np.linalg.norm(own))

    def giving(rules: Iterable[Advantages]) -> list[Advantages]:
        return [rule for rule in rules if float(np.linalg.norm(rule.values[tokens] - own)) <= limit]

    return (
        giving(of_rewards(update)) or giving(_configured(update)) or giving(solved(update, recorded, tokens))
    )


def _configured(update: UpdateTokens) -> Iterator[Advantages]:
    objective = configured(update)
    if objective is not None:
        with suppress(RegressError):  # it asks for more than rewards
            yield Advantages("the rule of the configuration", by_tokens(update, objective))


def contradiction(update: UpdateTokens, tokens: Ints) -> tuple[str, list[str]]:
    """Return why the recorded advantages cannot be those of the recorded rewards, and some samples; empty if they can.

    Those that differ within a sample are of a critic or of tokens, and those that are the reward but for one number of
    each group are of a baseline, such as the reward of a greedy completion: a dump does not hold what they are made of.
    """
    recorded, objective = update.get("is_loss_debug/advantages"), configured(update)
    tokens = _in_the_loss(update, tokens)
    if recorded is None or not update.trajectories:
        return "", []
    if objective is not None and (ADVANTAGES[objective.advantage].needs or objective.kl_in_reward):
        return "", []
    each = _of_samples(update, recorded, tokens)
    if each is None or named(update, tokens, _coarse(recorded[tokens])):
        return "", []
    known = np.flatnonzero(~np.isnan(each))
    rewards = np.array([t.reward for t in update.trajectories])[known]
    rest, groups = rewards - each[known], groups_of(update)[known]
    bound = max(1e-5, _coarse(each[known])) * max(np.abs(rewards).max(), np.abs(each[known]).max())
    if all(np.ptp(rest[groups == group]) <= bound for group in np.unique(groups)):
        return "", []
    trajectories = [update.trajectories[i] for i in known[:SHOWN]]
    names = [
        f"{t.group_id}/{t.run_id} reward {t.reward:.4g}, advantage {value:.4g}"
        for t, value in zip(trajectories, each[known], strict=False)
    ]
    return "no known formula of the recorded rewards gives them", names


def _in_the_loss(update: UpdateTokens, tokens: Ints) -> Ints:
    """Return those of some tokens that have an advantage: those in the recorded mask of the loss, if there is one."""
    mask = update.get("is_loss_debug/effective_valid")
    return tokens if mask is None else tokens[np.nan_to_num(mask[tokens]) != 0]


def _of_samples(update: UpdateTokens, recorded: Floats, tokens: Ints) -> Floats | None:
    """Return one advantage for each trajectory, NaN without any; None where those of a sample differ."""
    own, sample = recorded[tokens], update.rollout[update.sample[tokens]]
    size = len(update.trajectories)
    low, high = np.full(size, np.inf), np.full(size, -np.inf)
    np.minimum.at(low, sample, own)
    np.maximum.at(high, sample, own)
    seen = np.isfinite(low)
    if (high[seen] - low[seen] > max(1e-5, _coarse(own)) * np.abs(own).max(initial=0.0)).any():
        return None
    return np.where(seen, low, np.nan)


def _coarse(values: Floats) -> float:
    """Return the relative error of values that a coarse dtype holds exactly, so that they may have been rounded."""
    single = values.astype(np.float32)
    if not (single.view(np.uint32) & 0xFFFF).any():
        return COARSE["bfloat16"]
    return COARSE["float16"] if (single.astype(np.float16) == values).all() else 0.0
