"""Batches of plain numbers, and formulas of advantages as loops over them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from regress.grpo.advantage_computation import token_advantages
from regress.grpo.fields import ObjectiveFields
from tests.unit.grpo.plain_losses import doubles

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
