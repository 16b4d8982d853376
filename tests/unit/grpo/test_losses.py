"""Token losses by hand: every branch of every clip, with its value and its gradient."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from regress.errors import ConfigError
from regress.grpo.argument_checks import InputError
from regress.grpo.objective import Objective
from regress.grpo.objective_presets import make_objective
from regress.grpo.token_losses import TokenLoss, token_loss

LOG_P = -1.5


def one_token(ratio: float, advantage: float, objective: Objective) -> tuple[TokenLoss, float]:
    """Loss of a single token with the given ratio, and its derivative by the token's log-prob."""
    log_p = torch.tensor([LOG_P], dtype=torch.float64, requires_grad=True)
    old = log_p.detach() - math.log(ratio)
    loss = token_loss(
        log_p, old, torch.tensor([advantage], dtype=torch.float64), torch.tensor([0]), 1, objective
    )
    (gradient,) = torch.autograd.grad(loss.loss_K.sum(), log_p)
    return loss, float(gradient)


# ratio, advantage, fields, loss, derivative by log p
BRANCHES = [
    # inside the range: -r A, and so is its derivative
    (1.1, 2.0, {}, -2.2, -2.2),
    (0.9, -2.0, {}, 1.8, 1.8),
    # clipped: the objective stops rewarding the move
    (1.5, 2.0, {}, -2.4, 0.0),
    (0.5, -2.0, {}, 1.6, 0.0),
    # the pessimistic side is never clipped
    (0.5, 2.0, {}, -1.0, -1.0),
    (1.5, -2.0, {}, 3.0, 3.0),
    # clip-higher moves the upper bound only
    (1.25, 2.0, {"clip_high": 0.28}, -2.5, -2.5),
    (1.5, 2.0, {"clip_high": 0.28}, -2.56, 0.0),
    (0.75, -2.0, {"clip_high": 0.28}, 1.6, 0.0),
    # bounds given as they are
    (1.5, 2.0, {"clip_bounds": "absolute", "clip_low": 0.8, "clip_high": 1.3}, -2.6, 0.0),
    # delta caps what a negative advantage may cost
    (9.0, -2.0, {"delta": 4.0}, 8.0, 0.0),
    (3.0, -2.0, {"delta": 4.0}, 6.0, 6.0),
    (9.0, 2.0, {"delta": 4.0}, -2.4, 0.0),
    # dual clip does so too, and leaves positive advantages alone
    (9.0, -2.0, {"dual_clip": 3.0}, 6.0, 0.0),
    (2.5, -2.0, {"dual_clip": 3.0}, 5.0, 5.0),
    (9.0, 2.0, {"dual_clip": 3.0}, -2.4, 0.0),
    (0.1, 2.0, {"dual_clip": 3.0}, -0.2, -0.2),
    # clamped log-ratio: constant beyond
    (9.0, -2.0, {"log_ratio_max": math.log(4)}, 8.0, 0.0),
    (0.01, 2.0, {"log_ratio_min": math.log(0.25)}, -0.5, 0.0),
    # cispo: the weight is clipped, the gradient is that weight times A, whatever the sign
    (1.5, 2.0, {"loss": "cispo"}, -1.2 * 2 * LOG_P, -2.4),
    (1.5, -2.0, {"loss": "cispo"}, 1.2 * 2 * LOG_P, 2.4),
    (0.5, 2.0, {"loss": "cispo"}, -0.8 * 2 * LOG_P, -1.6),
    (
        9.0,
        2.0,
        {"loss": "cispo", "clip_bounds": "absolute", "clip_low": 0.0, "clip_high": 5.0},
        -10 * LOG_P,
        -10.0,
    ),
    (
        0.1,
        2.0,
        {"loss": "cispo", "clip_bounds": "absolute", "clip_low": 0.0, "clip_high": 5.0},
        -0.2 * LOG_P,
        -0.2,
    ),
    (9.0, 2.0, {"loss": "importance_sampling"}, -18.0, -18.0),
    (9.0, 2.0, {"loss": "reinforce"}, -2 * LOG_P, -2.0),
    (9.0, 0.0, {}, 0.0, 0.0),
]


@pytest.mark.parametrize(("ratio", "advantage", "fields", "value", "derivative"), BRANCHES)
def test_branch(
    ratio: float, advantage: float, fields: dict[str, Any], value: float, derivative: float
) -> None:
    loss, gradient = one_token(ratio, advantage, make_objective(**fields))
    assert loss.loss_K.item() == pytest.approx(value, rel=1e-14, abs=1e-14)
    assert gradient == pytest.approx(derivative, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize(
    ("ratio", "advantage", "low", "high", "dual"),
    [
        (0.5, -1.0, True, False, False),
        (0.5, 1.0, False, False, False),
        (1.5, 1.0, False, True, False),
        (1.5, -1.0, False, False, False),
        (5.0, -1.0, False, False, True),
        (5.0, 1.0, False, True, False),
        (1.0, 1.0, False, False, False),
    ],
)
def test_clip_flags(ratio: float, advantage: float, low: bool, high: bool, dual: bool) -> None:
    loss, _ = one_token(ratio, advantage, make_objective(dual_clip=3.0))
    assert (loss.clipped_low_K.item(), loss.clipped_high_K.item(), loss.dual_clipped_K.item()) == (
        low,
        high,
        dual,
    )
    unclipped, _ = one_token(ratio, advantage, make_objective(loss="importance_sampling"))
    assert not (unclipped.clipped_low_K | unclipped.clipped_high_K | unclipped.dual_clipped_K).any()


SEQUENCE = torch.tensor([0, 0, 2])
NEW = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
OLD = torch.tensor([-1.2, -1.8, -0.7], dtype=torch.float64)
ADVANTAGES = torch.tensor([1.0, 1.0, -2.0], dtype=torch.float64)


def three_tokens(objective: Objective, **given: Any) -> tuple[TokenLoss, Tensor]:
    new = NEW.clone().requires_grad_()
    loss = token_loss(new, OLD, ADVANTAGES, SEQUENCE, 3, objective, **given)
    return loss, torch.autograd.grad(loss.loss_K.sum(), new)[0]


def test_sequence_ratio_and_its_two_gradients() -> None:
    new = torch.tensor([0.3, -0.1, 0.2], dtype=torch.float64)
    old = torch.zeros(3, dtype=torch.float64)
    for level, first in (("sequence", math.exp(0.1)), ("sequence_product", math.exp(0.2))):
        for through in ("sequence", "token"):
            leaf = new.clone().requires_grad_()
            objective = make_objective(
                loss="importance_sampling", importance_level=level, sequence_gradient=through
            )
            loss = token_loss(leaf, old, ADVANTAGES, SEQUENCE, 3, objective)
            assert loss.ratio_K.tolist() == pytest.approx([first, first, math.exp(0.2)], rel=1e-14)
            # weigh one token only: who gets its gradient?
            (gradient,) = torch.autograd.grad(loss.loss_K[0], leaf)
            share = {"sequence": 0.5, "sequence_product": 1.0}[level]
            expected = [-first, 0, 0] if through == "token" else [-first * share, -first * share, 0]
            assert gradient.tolist() == pytest.approx(expected, rel=1e-14)


def test_sequence_ratio_is_clipped_as_one() -> None:
    # token ratios 1.6 and 0.65 would be clipped one by one; their geometric mean 1.02 is not
    new = torch.tensor([math.log(1.6), math.log(0.65)], dtype=torch.float64)
    objective = make_objective(importance_level="sequence", clip_low=0.05, clip_high=0.05)
    loss = token_loss(
        new, torch.zeros(2).double(), torch.ones(2).double(), torch.zeros(2).long(), 1, objective
    )
    assert loss.loss_K.tolist() == pytest.approx([-math.sqrt(1.6 * 0.65)] * 2)
    assert not loss.clipped_high_K.any()


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_product"])
@pytest.mark.parametrize("through", ["sequence", "token"])
def test_on_policy_the_ratio_is_exactly_one(level: str, through: str) -> None:
    old = torch.randn(50, dtype=torch.float32).abs().neg()
    sequence = torch.arange(50) // 7
    objective = make_objective(importance_level=level, sequence_gradient=through)
    loss = token_loss(old.clone().requires_grad_(), old, torch.ones(50), sequence, 8, objective)
    assert torch.equal(loss.ratio_K, torch.ones(50))
    assert not (loss.clipped_low_K | loss.clipped_high_K).any()


def test_kl_estimators_by_hand() -> None:
    ref = torch.tensor([-1.5, -2.0, -0.1], dtype=torch.float64)
    x = [0.5, 0.0, -0.4]
    expected = {
        "k1": x,
        "k2": [value**2 / 2 for value in x],
        "k3": [math.exp(-value) + value - 1 for value in x],
    }
    slopes = {"k1": [1.0] * 3, "k2": x, "k3": [1 - math.exp(-value) for value in x]}
    policy, policy_slope = three_tokens(make_objective())
    for estimator, values in expected.items():
        objective = make_objective(kl_coef=0.3, kl_estimator=estimator)
        loss, slope = three_tokens(objective, ref_log_probs_K=ref)
        assert loss.kl_K is not None
        assert loss.kl_K.tolist() == pytest.approx(values, rel=1e-12, abs=1e-15)
        torch.testing.assert_close(loss.loss_K, policy.loss_K + 0.3 * loss.kl_K)
        assert (slope - policy_slope).tolist() == pytest.approx(
            [0.3 * s for s in slopes[estimator]], abs=1e-14
        )


def test_kl_clamps_stop_value_and_gradient() -> None:
    ref = torch.tensor([29.0, -2.0, -30.5], dtype=torch.float64)
    objective = make_objective(kl_coef=1.0, kl_log_ratio_clamp=20.0, kl_clamp=10.0)
    loss, slope = three_tokens(objective, ref_log_probs_K=ref)
    assert loss.kl_K is not None
    assert loss.kl_K.tolist() == [10.0, 0.0, 10.0]
    _, policy_slope = three_tokens(make_objective())
    assert torch.equal(slope, policy_slope)


def test_kl_bias_correction_multiplies_by_the_differentiable_ratio() -> None:
    ref = torch.tensor([-1.5, -2.0, -0.1], dtype=torch.float64)
    objective = make_objective(loss="reinforce", kl_coef=1.0, kl_bias_correction=True)
    loss, slope = three_tokens(objective, ref_log_probs_K=ref)
    x, r = (NEW - ref), (NEW - OLD).exp()
    k3 = (-x).exp() + x - 1
    assert loss.kl_K is not None
    torch.testing.assert_close(loss.kl_K, k3 * r)
    torch.testing.assert_close(slope, -ADVANTAGES + (1 - (-x).exp()) * r + k3 * r)


def test_kl_in_the_reward_leaves_the_loss_alone() -> None:
    loss, _ = three_tokens(make_objective(kl_coef=1.0, kl_placement="reward", kl_estimator="k1"))
    assert loss.kl_K is None


@pytest.mark.parametrize("coefficient", [0.5, 1.0])
def test_entropy_bonus_is_subtracted_and_differentiable(coefficient: float) -> None:
    entropy = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    loss, _ = three_tokens(make_objective(entropy_coef=coefficient), entropy_K=entropy)
    torch.testing.assert_close(loss.loss_K, loss.policy_K - coefficient * entropy.detach())
    assert torch.autograd.grad(loss.loss_K.sum(), entropy)[0].tolist() == [-coefficient] * 3


def test_an_entropy_without_coefficient_is_only_reported() -> None:
    entropy = torch.tensor([1.0, math.nan, math.inf], dtype=torch.float64)
    watched, _ = three_tokens(make_objective(), entropy_K=entropy)
    assert torch.equal(watched.loss_K, watched.policy_K)
    assert watched.loss_K.isfinite().all()
    assert watched.entropy_K is not None


def test_a_scale_in_double_leaves_the_loss_in_single() -> None:
    loss = token_loss(
        NEW.float(),
        OLD.float(),
        ADVANTAGES.float(),
        SEQUENCE,
        3,
        make_objective(entropy_coef=0.5),
        entropy_K=torch.ones(3),
        entropy_scale_K=ADVANTAGES,
    )
    assert loss.loss_K.dtype == torch.float32
    assert loss.entropy_term_K is not None
    assert loss.entropy_term_K.tolist() == ADVANTAGES.tolist()


def test_weights_that_are_given_carry_no_gradient() -> None:
    weights = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64, requires_grad=True)
    objective = make_objective(sampler_correction="token_mask", correction_max=0.1)
    loss, _ = three_tokens(objective, correction_K=weights)
    plain, _ = three_tokens(make_objective())
    torch.testing.assert_close(loss.policy_K, plain.policy_K * weights.detach(), rtol=1e-14, atol=0)
    (gradient,) = torch.autograd.grad(
        token_loss(NEW, OLD, ADVANTAGES, SEQUENCE, 3, objective, correction_K=weights).loss_K.sum()
        + 0 * weights.sum(),
        weights,
    )
    assert gradient.tolist() == [0.0, 0.0, 0.0]


# p_old / p_sampler is [4, 0.5, 1] per token, [2, 2, 1] per sample
SAMPLER = OLD - torch.tensor([4.0, 0.5, 1.0], dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("correction", "low", "high", "weights"),
    [
        ("token_truncate", None, 2.0, [2.0, 0.5, 1.0]),
        ("token_truncate", 0.8, 2.0, [2.0, 0.8, 1.0]),
        ("token_mask", None, 3.0, [0.0, 0.5, 1.0]),
        ("token_mask", 0.8, None, [4.0, 0.0, 1.0]),
        ("token_mask", 0.8, 3.0, [0.0, 0.0, 1.0]),
        ("sequence_truncate", None, 1.5, [1.5, 1.5, 1.0]),
        ("sequence_mask", None, 1.5, [0.0, 0.0, 1.0]),
        ("sequence_mask", None, 3.0, [2.0, 2.0, 1.0]),
    ],
)
def test_sampler_correction(
    correction: str, low: float | None, high: float | None, weights: list[float]
) -> None:
    objective = make_objective(
        sampler_correction=correction, correction_min=low, correction_max=high, kl_coef=0.1, kl_estimator="k2"
    )
    plain, plain_slope = three_tokens(make_objective())
    ref = NEW.clone()  # no KL, so that gradients are the policy's alone
    loss, slope = three_tokens(objective, sampler_log_probs_K=SAMPLER, ref_log_probs_K=ref)
    assert loss.correction_K is not None
    assert loss.correction_K.tolist() == pytest.approx(weights, rel=1e-14)
    torch.testing.assert_close(loss.policy_K, plain.policy_K * loss.correction_K)
    torch.testing.assert_close(slope, plain_slope * loss.correction_K)


def test_sampler_correction_leaves_the_kl_unweighted() -> None:
    objective = make_objective(sampler_correction="token_mask", correction_max=0.1, kl_coef=1.0)
    loss, _ = three_tokens(objective, sampler_log_probs_K=SAMPLER, ref_log_probs_K=NEW - 1)
    assert loss.kl_K is not None
    assert torch.equal(loss.loss_K, loss.kl_K)


def test_unknown_sampler_log_prob_counts_as_no_difference() -> None:
    sampler = SAMPLER.clone()
    sampler[0] = math.nan
    for correction, weights in (("token_truncate", [1.0, 0.5, 1.0]), ("sequence_truncate", [0.5, 0.5, 1.0])):
        objective = make_objective(sampler_correction=correction, correction_max=9.0)
        loss, _ = three_tokens(objective, sampler_log_probs_K=sampler)
        assert loss.correction_K is not None
        assert loss.correction_K.tolist() == pytest.approx(weights)


@pytest.mark.parametrize(
    "fields",
    [
        {"loss": "cispo", "sampler_correction": "token_truncate", "correction_max": 2.0},
        {"loss": "dro", "dro_beta": 0.5},
        {"loss": "geo_mean"},
        {"loss": "importance_sampling"},
    ],
)
def test_only_log_probs_and_entropy_carry_gradients(fields: dict[str, Any]) -> None:
    leaves = {name: NEW.clone().requires_grad_() for name in ("old", "advantages", "ref", "sampler")}
    loss = token_loss(
        NEW.clone().requires_grad_(),
        leaves["old"],
        leaves["advantages"],
        SEQUENCE,
        3,
        make_objective(kl_coef=0.5, entropy_coef=0.1, **fields),
        ref_log_probs_K=leaves["ref"],
        sampler_log_probs_K=leaves["sampler"],
        entropy_K=torch.ones(3, dtype=torch.float64, requires_grad=True),
        entropy_scale_K=ADVANTAGES,
    )
    loss.loss_K.sum().backward()
    assert all(leaf.grad is None for leaf in leaves.values())
    parts = [value for name, value in vars(loss).items() if name != "loss_K" and value is not None]
    assert not any(part.requires_grad for part in parts)
    assert loss.entropy_term_K is not None


def test_an_entropy_that_is_weighed_like_the_loss_has_no_term_of_its_own() -> None:
    entropy = torch.ones(3, dtype=torch.float64)
    for scale in (None, ADVANTAGES):
        loss, _ = three_tokens(make_objective(entropy_coef=0.1), entropy_K=entropy, entropy_scale_K=scale)
        assert (loss.entropy_term_K is None) == (scale is None)


def test_no_tokens_make_no_loss() -> None:
    empty = torch.zeros(0)
    loss = token_loss(empty, empty, empty, torch.zeros(0).long(), 4, make_objective("verl:gspo"))
    assert loss.loss_K.shape == (0,)
    leaf = torch.zeros(0, requires_grad=True)
    again = token_loss(leaf, empty, empty, torch.zeros(0).long(), 4, make_objective("verl:gspo"))
    assert torch.autograd.grad(again.loss_K.sum(), leaf)[0].shape == (0,)


def test_missing_or_mismatched_tensors_are_named() -> None:
    with pytest.raises(InputError) as error:
        three_tokens(make_objective(kl_coef=0.1))
    assert str(error.value) == "ref_log_probs_K is missing: kl_coef needs it; provide it or set kl_coef=0."
    with pytest.raises(InputError, match=r"sampler_log_probs_K is missing: sampler_correction needs it"):
        three_tokens(make_objective(sampler_correction="token_mask", correction_max=2.0))
    with pytest.raises(InputError, match=r"entropy_K is missing: entropy_coef needs it"):
        three_tokens(make_objective(entropy_coef=0.1))
    with pytest.raises(InputError, match=r"entropy_K has shape \(2,\) where sequence_K has \(3,\)"):
        three_tokens(make_objective(), entropy_K=torch.zeros(2))
    with pytest.raises(InputError, match=r"old_log_probs_K is nan at token 1"):
        token_loss(NEW, torch.tensor([0, math.nan, 0]), ADVANTAGES, SEQUENCE, 3, Objective())
    with pytest.raises(InputError, match=r"log_probs_K is -inf at token 2"):
        token_loss(torch.tensor([0, 0, -math.inf]), OLD, ADVANTAGES, SEQUENCE, 3, Objective())
    broken = torch.tensor([0.0, math.nan, 0.0])
    with pytest.raises(InputError, match=r"ref_log_probs_K is nan at token 1"):
        three_tokens(make_objective(kl_coef=0.1), ref_log_probs_K=broken)
    with pytest.raises(InputError, match=r"entropy_K is nan at token 1"):
        three_tokens(make_objective(entropy_coef=0.1), entropy_K=broken)
    with pytest.raises(InputError, match=r"advantages_K is inf at token 0"):
        token_loss(NEW, OLD, torch.tensor([math.inf, 0, 0]), SEQUENCE, 3, Objective())


@pytest.mark.parametrize(
    ("field", "value", "near"),
    [
        ("loss", "ppo", None),
        ("importance_level", "sequences", "sequence"),
        ("sequence_gradient", "tokens", "token"),
        ("kl_estimator", "k4", None),
        ("sampler_correction", "token_truncated", "token_truncate"),
    ],
)
def test_unknown_choices_are_refused_where_they_are_used(field: str, value: str, near: str | None) -> None:
    objective = Objective(kl_coef=1.0)
    setattr(objective, field, value)
    hint = f".*did you mean '{near}'" if near else ""
    with pytest.raises(ConfigError, match=f"{field}='{value}' is unknown: choose one of{hint}"):
        three_tokens(objective, ref_log_probs_K=NEW, sampler_log_probs_K=NEW)
