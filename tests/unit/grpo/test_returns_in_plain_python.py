"""Advantages of estimators of tokens against loops over plain numbers, written from the formulas."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from regress.grpo.argument_checks import InputError
from tests.unit.grpo.plain_advantages import Batch, batch, found, whitened


def token_rewards(given: Batch, sample: int, penalized: bool) -> list[float]:
    rewards = [-one for one in given.tokens(sample, given.penalties)] if penalized else []
    rewards = rewards or [0.0] * given.lengths[sample]
    if rewards:
        rewards[-1] += given.rewards[sample]
    return rewards


def returns(rewards: Sequence[float], gamma: float) -> list[float]:
    return [
        math.fsum(gamma ** (later - t) * rewards[later] for later in range(t, len(rewards)))
        for t in range(len(rewards))
    ]


@pytest.mark.parametrize("penalized", [False, True])
def test_returns_of_tokens(penalized: bool) -> None:
    given = batch(9)
    all_returns = [
        returns(token_rewards(given, sample, penalized), 0.9) for sample in range(len(given.groups))
    ]
    wanted = whitened([one for sample in all_returns for one in sample], 1, 1e-8)
    fields = {"gamma": 0.9}
    assert found(given, penalized, advantage="reinforce_plus_plus", **fields) == pytest.approx(
        wanted, rel=1e-11
    )
    baselines = [0.1 * number - 0.3 for number in range(10)]
    whole = [
        one - baselines[sample]
        for sample in range(10)
        for one in returns(token_rewards(given, sample, penalized), 1.0)
    ]
    actual = found(given, penalized, advantage="remax", gamma=0.9, baselines=baselines)
    assert actual == pytest.approx(whole, rel=1e-12)
    with pytest.raises(InputError, match="baselines_N is missing"):
        found(given, advantage="remax")
    with pytest.raises(InputError, match="baselines_N is missing"):
        found(given, advantage="remax", baselines=baselines[:3])


def test_advantages_of_a_critic() -> None:
    given, gamma, lam = batch(10), 0.9, 0.8
    result = []
    for sample in range(len(given.groups)):
        rewards, values = token_rewards(given, sample, True), given.tokens(sample, given.values)
        deltas = [
            reward + gamma * (values[t + 1] if t + 1 < len(values) else 0.0) - values[t]
            for t, reward in enumerate(rewards)
        ]
        result += returns(deltas, gamma * lam)
    actual = found(given, True, advantage="gae", gamma=gamma, lam=lam)
    assert actual == pytest.approx(whitened(result, 1, 1e-8), rel=1e-11)


def optimal(
    given: Batch, *, weights: bool, positions: bool, zero_tail: bool, by_position: bool
) -> list[float]:
    """Return of each token minus ``sum(W R) / (sum(W) + 1e-8)`` over the tokens of its group at its position."""
    first = [sum(given.lengths[:sample]) for sample in range(10)]
    score = [
        (1 - 2 * math.exp(old) + square) * (weight**2 if weights else 1.0)
        for old, square, weight in zip(given.old, given.squares, given.weights, strict=True)
    ]
    result = []
    for sample in range(10):
        rewards = returns(token_rewards(given, sample, True), 1.0)
        members = [other for other in range(10) if given.groups[other] == given.groups[sample]]
        if not (by_position and positions):
            members = [other for other in members if given.lengths[other]]
        lengths = sorted(given.lengths[other] for other in members)
        longest = next((other for other in members if given.lengths[other] == lengths[-1]), None)
        for t, own in enumerate(rewards):
            place = given.positions[first[sample] + t] if positions else t
            above = below = 0.0
            for other in members:
                others = returns(token_rewards(given, other, True), 1.0)
                for u in range(given.lengths[other]):
                    at = given.positions[first[other] + u] if positions else u
                    if at == place:
                        total = math.fsum(score[first[other] : first[other] + u + 1])
                        above, below = above + total * others[u], below + total
            beyond = (
                zero_tail and sample == longest and len(members) > 1 and place >= lengths[-2] < lengths[-1]
            )
            result.append(own if len(members) < 2 or beyond else own - above / (below + 1e-8))
    return result


@pytest.mark.parametrize("zero_tail", [False, True])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_optimal_baselines_of_tokens(name: str, positions: bool, weights: bool, zero_tail: bool) -> None:
    given, by_position = batch(11), name == "optimal_token_baseline"
    wanted = optimal(
        given,
        weights=weights,
        positions=positions and by_position,
        zero_tail=zero_tail,
        by_position=by_position,
    )
    actual = found(given, True, advantage=name, weights=weights, positions=positions, otb_zero_tail=zero_tail)
    assert actual == pytest.approx(wanted, rel=1e-11)
