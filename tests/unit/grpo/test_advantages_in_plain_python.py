"""Advantages of every estimator against loops over plain numbers, written from the formulas."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from regress.grpo.advantages import token_advantages
from regress.grpo.fields import ObjectiveFields
from regress.grpo.groups import group_statistics
from regress.grpo.inputs import InputError

NAN = math.nan


@dataclass
class Batch:
    """Samples of a batch: rewards, group and number of tokens of each, and numbers of each token."""

    rewards: list[float]
    groups: list[int]
    lengths: list[int]
    penalties: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    old: list[float] = field(default_factory=list)
    squares: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    @property
    def sequence(self) -> list[int]:
        return [sample for sample, length in enumerate(self.lengths) for _ in range(length)]

    def tokens(self, sample: int, values: Sequence[float]) -> list[float]:
        start = sum(self.lengths[:sample])
        return list(values[start : start + self.lengths[sample]])

    def members(self, sample: int) -> list[int]:
        return [
            other
            for other, group in enumerate(self.groups)
            if group == self.groups[sample] and not math.isnan(self.rewards[other])
        ]


def batch(seed: int, *, missing: bool = False) -> Batch:
    """Groups of three, one, two and four; one sample has no token, and two rewards of a group are equal."""
    draw = random.Random(seed)
    groups = [5, 5, 5, 2, 7, 7, 1, 1, 1, 1]
    rewards = [draw.gauss(0, 1) for _ in groups]
    rewards[7] = rewards[6]
    rewards[1] = 0.0
    if missing:
        rewards[8] = NAN
    lengths = [2, 3, 1, 2, 4, 0, 3, 1, 2, 2]
    K = sum(lengths)
    places = [3 * place + (place > 1) for length in lengths for place in range(length)]
    return Batch(
        rewards,
        groups,
        lengths,
        [draw.gauss(0, 0.1) for _ in range(K)],
        [draw.gauss(0, 1) for _ in range(K)],
        [-abs(draw.gauss(0, 1)) - 0.1 for _ in range(K)],
        [draw.uniform(0.2, 0.9) for _ in range(K)],
        [draw.uniform(0.5, 1.5) for _ in range(K)],
        places,
    )


def found(given: Batch, penalized: bool = False, rewards: Any = None, **fields: Any) -> list[float]:
    known = {"weights", "positions", "reward_weights", "baselines"} & set(fields)
    extra: dict[str, Any] = {name: fields.pop(name) for name in known}
    objective = ObjectiveFields(**fields)

    def doubles(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    return token_advantages(
        doubles(given.rewards if rewards is None else rewards),
        torch.tensor(given.groups),
        torch.tensor(given.sequence),
        objective,
        doubles(given.penalties) if penalized else None,
        reward_weights=extra.get("reward_weights"),
        baselines_N=doubles(extra["baselines"]) if "baselines" in extra else None,
        values_K=doubles(given.values),
        old_log_probs_K=doubles(given.old),
        sum_pi_squared_K=doubles(given.squares),
        correction_K=doubles(given.weights) if extra.get("weights") else None,
        position_K=torch.tensor(given.positions) if extra.get("positions") else None,
    ).tolist()


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def std(values: Sequence[float], ddof: int) -> float:
    middle = mean(values)
    return math.sqrt(math.fsum((value - middle) ** 2 for value in values) / max(len(values) - ddof, 1))


def over_tokens(given: Batch, of_samples: Sequence[float]) -> list[float]:
    return [0.0 if math.isnan(of_samples[sample]) else of_samples[sample] for sample in given.sequence]


def whitened(values: Sequence[float], ddof: int, eps: float) -> list[float]:
    middle, scale = mean(values), math.sqrt(std(values, ddof) ** 2 + eps)
    return [(value - middle) / scale for value in values]


def scale_of(given: Batch, sample: int, rule: str, ddof: int, eps: float, raw: bool) -> float:
    members = given.members(sample)
    if rule == "none":
        return 1.0
    if raw and len(members) == 1:
        return 1.0 + eps
    known = [reward for reward in given.rewards if not math.isnan(reward)]
    return std([given.rewards[other] for other in members] if rule == "group" else known, ddof) + eps


def divided(value: float, scale: float) -> float:
    return 0.0 if value == 0.0 else value / scale


COMMON = [
    {"scale": scale, "ddof": ddof, "single_sample": single, "eps": 0.01}
    for scale, ddof, single in (
        ("group", 1, "zero"),
        ("group", 0, "raw"),
        ("batch", 1, "raw"),
        ("batch", 0, "zero"),
        ("none", 1, "raw"),
    )
]


def centred(given: Batch, sample: int) -> float:
    members = given.members(sample)
    return given.rewards[sample] - mean([given.rewards[other] for other in members])


def of_grpo(given: Batch, sample: int) -> float:
    return centred(given, sample)


def of_rloo(given: Batch, sample: int) -> float:
    others = [given.rewards[other] for other in given.members(sample) if other != sample]
    return given.rewards[sample] - mean(others) if others else 0.0


def of_passk(given: Batch, sample: int) -> float:
    own = sorted((given.rewards[other] for other in given.members(sample)), reverse=True)
    best = next(other for other in given.members(sample) if given.rewards[other] == own[0])
    return own[0] - own[1] if sample == best else 0.0


def expected(given: Batch, formula: Any, fields: dict[str, Any]) -> list[float]:
    result = []
    raw = fields["single_sample"] == "raw"
    for sample, reward in enumerate(given.rewards):
        if math.isnan(reward):
            result.append(NAN)
            continue
        alone = len(given.members(sample)) == 1
        value = (reward if raw else 0.0) if alone else formula(given, sample)
        scale = scale_of(given, sample, fields["scale"], fields["ddof"], fields["eps"], raw)
        result.append(divided(value, scale))
    return result


@pytest.mark.parametrize("fields", COMMON, ids=lambda fields: "-".join(map(str, fields.values())))
@pytest.mark.parametrize(("name", "formula"), [("grpo", of_grpo), ("rloo", of_rloo)])
@pytest.mark.parametrize("missing", [False, True])
def test_estimators_of_groups(name: str, formula: Any, fields: dict[str, Any], missing: bool) -> None:
    given = batch(1, missing=missing)
    rule = "exclude" if missing else "error"
    actual = found(given, advantage=name, missing_rewards=rule, **fields)
    assert actual == pytest.approx(over_tokens(given, expected(given, formula, fields)), rel=1e-12)


@pytest.mark.parametrize("fields", COMMON, ids=lambda fields: "-".join(map(str, fields.values())))
def test_the_best_of_a_group_against_the_second_best(fields: dict[str, Any]) -> None:
    given = batch(2, missing=True)
    given.groups[3] = 2 if given.groups[3] != 2 else 5  # no group of one
    given.rewards[6] = given.rewards[7] = 9.0  # equal ones: the first is the best
    actual = found(given, advantage="grpo_passk", missing_rewards="exclude", **fields)
    assert actual == pytest.approx(over_tokens(given, expected(given, of_passk, fields)), rel=1e-12)
    given.groups[3] = 99
    with pytest.raises(InputError, match="second best"):
        found(given, advantage="grpo_passk", missing_rewards="exclude", **fields)


@pytest.mark.parametrize("missing", [False, True])
def test_gpg_scales_by_the_share_of_rewards_other_than_zero(missing: bool) -> None:
    given = batch(3, missing=missing)
    rule = "exclude" if missing else "error"
    actual = found(given, advantage="gpg", gpg_norm=3.0, single_sample="raw", missing_rewards=rule)
    known = [reward for reward in given.rewards if not math.isnan(reward)]
    alpha = len(known) / sum(reward != 0 for reward in known)
    plain = expected(given, of_grpo, {"scale": "none", "ddof": 1, "single_sample": "raw", "eps": 0.0})
    assert actual == pytest.approx(over_tokens(given, [alpha * one / 3.0 for one in plain]), rel=1e-12)
    given.rewards = [0.0] * 10
    assert found(given, advantage="gpg") == [0.0] * len(given.sequence)


@pytest.mark.parametrize("missing", [False, True])
def test_opo_weighs_rewards_by_lengths(missing: bool) -> None:
    given = batch(4, missing=missing)
    result = []
    for sample, reward in enumerate(given.rewards):
        members = given.members(sample)
        if len(members) == 1:
            result.append(0.0)
            continue
        tokens = sum(given.lengths[other] for other in members)
        weighted = math.fsum(given.lengths[other] * given.rewards[other] for other in members)
        result.append(reward - weighted / max(tokens, 1))
    rule = "exclude" if missing else "error"
    actual = found(given, advantage="opo", single_sample="zero", missing_rewards=rule)
    assert actual == pytest.approx(over_tokens(given, result), rel=1e-12)
    given.rewards = [0.1, 0.1, 0.1, 7.0, 0.3, 0.3, 0.7, 0.7, NAN if missing else 0.7, 0.7]
    assert found(given, advantage="opo", single_sample="zero", missing_rewards=rule) == [0.0] * 20


def test_whitened_group_means_leave_the_scale_to_the_tokens() -> None:
    given = batch(5)
    plain = expected(given, of_grpo, {"scale": "none", "ddof": 1, "single_sample": "zero", "eps": 0.0})
    for ddof in (0, 1):
        wanted = whitened(over_tokens(given, plain), ddof, 0.3)
        fields = {"ddof": ddof, "whiten_eps": 0.3, "single_sample": "zero"}
        assert found(given, advantage="reinforce_plus_plus_baseline", **fields) == pytest.approx(
            wanted, rel=1e-11
        )


TWO = [[0.5, 1.0], [1.5, NAN], [0.2, 3.0], [1.0, 1.0], [0.1, 0.9]] * 2
"""Rewards of ten samples by two functions, one of them missing."""


def columns(given: Batch, weights: Sequence[float]) -> list[Batch]:
    return [
        Batch([weight * row[number] for row in TWO], given.groups, given.lengths)
        for number, weight in enumerate(weights)
    ]


def test_several_reward_functions() -> None:
    given, weights = batch(6), (2.0, -0.5)
    total = [math.fsum(w * r for w, r in zip(weights, row, strict=True) if not math.isnan(r)) for row in TWO]
    fields = {"scale": "group", "ddof": 1, "single_sample": "zero", "eps": 0.01}
    plain = expected(Batch(total, given.groups, given.lengths), of_grpo, fields)
    actual = found(given, rewards=TWO, reward_weights=weights, missing_rewards="exclude", **fields)
    assert actual == pytest.approx(over_tokens(given, plain), rel=1e-12)
    parts = [expected(one, of_grpo, fields) for one in columns(given, (1.0, 1.0))]
    summed = [
        math.fsum(w * part[n] for w, part in zip(weights, parts, strict=True) if not math.isnan(part[n]))
        for n in range(10)
    ]
    wanted = whitened(over_tokens(given, summed), 1, 1e-8)
    actual = found(
        given, rewards=TWO, reward_weights=weights, missing_rewards="exclude", advantage="gdpo", **fields
    )
    assert actual == pytest.approx(wanted, rel=1e-11)


def test_functions_that_are_normalized_before_their_sum() -> None:
    given, weights = batch(7), (2.0, -0.5)
    given.groups = [5, 5, 5, 2, 2, 2, 1, 1, 1, 1]
    fields = {"ddof": 1, "eps": 0.01}
    parts = [
        expected(one, of_grpo, {"scale": "group", "single_sample": "zero", **fields})
        for one in columns(given, (1.0, 1.0))
    ]
    summed = [
        math.fsum(w * part[n] for w, part in zip(weights, parts, strict=True) if not math.isnan(part[n]))
        for n in range(10)
    ]
    scale = std(summed, 1) + 0.01
    wanted = [(value - mean(summed)) / scale for value in summed]
    actual = found(
        given,
        rewards=TWO,
        reward_weights=weights,
        missing_rewards="exclude",
        reward_aggregation="normalize_then_sum",
        **fields,
    )
    assert actual == pytest.approx(over_tokens(given, wanted), rel=1e-11)


def test_normalized_advantages_and_bounds_of_rewards() -> None:
    given = batch(8)
    fields = {"scale": "none", "ddof": 1, "single_sample": "raw", "eps": 0.01}
    bounded = [min(max(reward, -0.3), 0.4) for reward in given.rewards]
    plain = expected(Batch(bounded, given.groups, given.lengths), of_rloo, fields)
    scale = std(plain, 1) + 0.01
    wanted = [(value - mean(plain)) / scale for value in plain]
    actual = found(
        given, advantage="rloo", reward_min=-0.3, reward_max=0.4, normalize_advantages=True, **fields
    )
    assert actual == pytest.approx(over_tokens(given, wanted), rel=1e-11)
    for one in ({"reward_min": -0.3}, {"reward_max": 0.4}):
        bounds = {"reward_min": -math.inf, "reward_max": math.inf, **one}
        clipped = [min(max(r, bounds["reward_min"]), bounds["reward_max"]) for r in given.rewards]
        plain = expected(Batch(clipped, given.groups, given.lengths), of_rloo, fields)
        assert found(given, advantage="rloo", **one, **fields) == pytest.approx(over_tokens(given, plain))


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


def test_opo_of_a_group_with_one_token() -> None:
    given = Batch([2.0, 5.0], [0, 0], [1, 0])
    given.values = given.old = given.squares = [0.0]
    assert found(given, advantage="opo") == [0.0]
    given = Batch([2.0, 5.0], [0, 0], [0, 1], values=[0.0], old=[0.0], squares=[0.0])
    assert found(given, advantage="opo") == [0.0]
    given = Batch([2.0, 5.0, 1.0], [0, 0, 0], [1, 0, 1], values=[0.0] * 2, old=[0.0] * 2, squares=[0.0] * 2)
    assert found(given, advantage="opo") == [0.5, -0.5]


def test_a_group_of_one_has_no_deviation() -> None:
    for ddof in (0, 1):
        group = group_statistics(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([4, 2, 2]), ddof)
        assert group.std[0].item() == 0.0
        assert group.std[1].item() == pytest.approx(std([1.0, 2.0], ddof))


def test_statistics_of_single_functions_are_taken_in_double_precision() -> None:
    rewards = torch.tensor([[1000.1, 1.0], [1000.2, 3.0], [1000.4, 2.0]], dtype=torch.float32)
    fields = ObjectiveFields(reward_aggregation="normalize_then_sum", eps=0.0)
    of_samples = torch.zeros(3, dtype=torch.int64), torch.arange(3)
    single = token_advantages(rewards, *of_samples, fields)
    assert single.dtype == torch.float32
    assert single.tolist() == token_advantages(rewards.double(), *of_samples, fields).float().tolist()


@pytest.mark.parametrize("name", ["remax", "gae", "optimal_token_baseline", "grpo", "reinforce_plus_plus"])
def test_no_gradient_flows_through_advantages(name: str) -> None:
    given = batch(12)

    def leaf(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, requires_grad=True)

    result = token_advantages(
        leaf(given.rewards),
        torch.tensor(given.groups),
        torch.tensor(given.sequence),
        ObjectiveFields(advantage=name),
        leaf(given.penalties),
        baselines_N=leaf(given.rewards),
        values_K=leaf(given.values),
        old_log_probs_K=leaf(given.old),
        sum_pi_squared_K=leaf(given.squares),
    )
    assert not result.requires_grad
