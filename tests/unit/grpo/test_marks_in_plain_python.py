"""Tokens that a loss tells apart by covariance or entropy against loops over plain numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from regress.grpo.fields import ObjectiveFields
from regress.grpo.token_losses import token_loss
from regress.grpo.token_samples import Samples
from regress.grpo.token_selection import (
    Compared,
    TokenSelection,
    drawn_by_covariance,
    greatest_covariances,
    high_entropy,
    marks_of,
)
from tests.unit.grpo.plain_losses import (
    CLIPS,
    LENGTHS,
    SEQUENCE,
    K,
    Tokens,
    agree,
    clip,
    computed,
    doubles,
    ppo,
)


def compared(t: Tokens) -> Compared:
    samples = Samples(torch.tensor(SEQUENCE), len(LENGTHS))
    return Compared(doubles(t.new), doubles(t.old), doubles(t.advantages), samples, doubles(t.entropy))


def covariances(t: Tokens) -> list[float]:
    a, p = math.fsum(t.advantages) / K, math.fsum(t.new) / K
    return [(x - a) * (y - p) for x, y in zip(t.advantages, t.new, strict=True)]


@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_tokens_that_are_told_apart_by_covariance(fraction: float, seed: int) -> None:
    t = Tokens(10 + seed)
    cov, count = covariances(t), max(int(fraction * K), 1)
    greatest = sorted(range(K), key=lambda k: -cov[k])[:count]
    fields: dict[str, Any] = {
        "cov_fraction": fraction,
        "cov_low": -0.4,
        "cov_high": 0.5,
        "cov_seed": seed,
        **CLIPS,
    }
    objective = ObjectiveFields(loss="clip_cov", **fields)
    assert greatest_covariances(compared(t), objective).nonzero()[:, 0].tolist() == sorted(greatest)
    free = []
    for k, (p, q, a) in enumerate(zip(t.new, t.old, t.advantages, strict=True)):
        r = math.exp(p - q)
        clipped = -a * clip(r, 0.85, 1.25) > -a * r
        if -0.4 < cov[k] < 0.5 and not clipped:
            free.append(k)
    order = torch.randperm(K, generator=torch.Generator().manual_seed(seed)).tolist()
    drawn = [k for k in order if k in free][:count]
    assert drawn_by_covariance(compared(t), objective).nonzero()[:, 0].tolist() == sorted(drawn)
    loss, _ = computed(t, loss="clip_cov", **fields)
    for k in range(K):
        r, a = math.exp(t.new[k] - t.old[k]), t.advantages[k]
        wanted = 0.0 if k in drawn else -min(r * a, clip(r, 0.85, 1.25) * a)
        assert loss.loss_K[k].item() == pytest.approx(wanted, rel=1e-12, abs=1e-14)

    def kl_cov(new: list[float], held: list[float], t: Tokens, o: ObjectiveFields) -> list[float]:
        return [
            -math.exp(p - q) * a + 0.4 * abs(p - q) * (k in greatest)
            for k, (p, q, a) in enumerate(zip(new, t.old, t.advantages, strict=True))
        ]

    agree(t, kl_cov, **{**fields, "loss": "kl_cov", "cov_kl_coef": 0.4})


@pytest.mark.parametrize("quantile", [0.05, 0.2, 0.5, 0.9])
def test_tokens_of_high_entropy(quantile: float) -> None:
    t = Tokens(20)
    ranked = sorted(t.entropy)
    place = (1 - quantile) * (K - 1)
    low, high = ranked[math.floor(place)], ranked[min(math.floor(place) + 1, K - 1)]
    bound = low + (high - low) * (place - math.floor(place))
    kept = [one >= bound - 1e-12 for one in t.entropy]
    objective = ObjectiveFields(top_entropy_quantile=quantile)
    assert high_entropy(doubles(t.entropy), objective).tolist() == kept
    scale = [1.0 + 0.2 * k for k in range(K)]
    loss = token_loss(
        doubles(t.new),
        doubles(t.old),
        doubles(t.advantages),
        torch.tensor(SEQUENCE),
        len(LENGTHS),
        ObjectiveFields(top_entropy_quantile=quantile, entropy_coef=0.2, entropy_aggregation="token-mean"),
        entropy_K=doubles(t.entropy),
        entropy_scale_K=doubles(scale),
    )
    for k in range(K):
        policy = ppo(math.exp(t.new[k] - t.old[k]), t.advantages[k], objective) * kept[k]
        entropy = t.entropy[k] * scale[k] * kept[k] * K / sum(kept)
        assert loss.loss_K[k].item() == pytest.approx(policy - 0.2 * entropy, rel=1e-12, abs=1e-14)
    assert high_entropy(doubles([]), objective).tolist() == []


def test_tokens_that_a_draw_leaves_out_keep_their_entropy() -> None:
    t = Tokens(26)
    objective = ObjectiveFields(
        loss="clip_cov", cov_low=-9.0, cov_high=9.0, entropy_coef=0.2, entropy_aggregation="token-mean"
    )
    known = doubles(t.new), doubles(t.old), doubles(t.advantages), torch.tensor(SEQUENCE), len(LENGTHS)
    scale = doubles([1.0 + 0.2 * k for k in range(K)])
    loss = token_loss(*known, objective, entropy_K=doubles(t.entropy), entropy_scale_K=scale)
    assert loss.kept_K is not None
    assert not loss.kept_K.all()
    assert loss.entropy_term_K is not None
    assert loss.entropy_term_K.tolist() == (doubles(t.entropy) * scale).tolist()


def test_equal_covariances_are_marked_in_their_order_and_none_is_drawn_at_a_bound() -> None:
    zeros = torch.zeros(100, dtype=torch.float64)
    tokens = Compared(zeros, zeros, zeros + 1.0, Samples(torch.arange(100), 100))
    found = greatest_covariances(tokens, ObjectiveFields(loss="kl_cov", cov_fraction=0.3))
    assert found.tolist() == [True] * 30 + [False] * 70
    for low, high, drawn in ((0.0, 1.0, 0), (-1.0, 0.0, 0), (-1.0, 1.0, 30)):
        objective = ObjectiveFields(loss="clip_cov", cov_fraction=0.3, cov_low=low, cov_high=high)
        assert int(drawn_by_covariance(tokens, objective).sum()) == drawn


def test_an_objective_that_tells_no_tokens_apart_has_no_marks() -> None:
    assert marks_of(compared(Tokens(27)), ObjectiveFields()) == TokenSelection()


def test_a_scale_that_comes_with_marks_is_left_as_it_is() -> None:
    t = Tokens(28)
    objective = ObjectiveFields(top_entropy_quantile=0.5, entropy_coef=0.2, entropy_aggregation="token-mean")
    known = doubles(t.new), doubles(t.old), doubles(t.advantages), torch.tensor(SEQUENCE), len(LENGTHS)
    scale = doubles([1.0 + 0.2 * k for k in range(K)])
    given = {"entropy_K": doubles(t.entropy), "entropy_scale_K": scale}
    loss = token_loss(*known, objective, **given, marks=marks_of(compared(t), objective))
    assert loss.entropy_term_K is not None
    assert loss.entropy_term_K.tolist() == (doubles(t.entropy) * scale).tolist()


def test_a_draw_that_leaves_no_token_leaves_no_entropy() -> None:
    one = doubles([-1.0])
    objective = ObjectiveFields(
        loss="clip_cov",
        cov_low=-1.0,
        top_entropy_quantile=0.5,
        entropy_coef=0.2,
        entropy_aggregation="token-mean",
    )
    known = one, one, -one, torch.tensor([0]), 1, objective
    loss = token_loss(*known, entropy_K=-one, entropy_scale_K=-one)
    assert loss.loss_K.tolist() == [0.0]
