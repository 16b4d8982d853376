"""Every loss, estimator, KL, aggregation and criterion that verl names, on its own functions, in float64.

The names are read from verl's registries and from the source of its functions, so that a new one fails here.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from names import KL, compared_texts, unknown
from ragged import Ragged, make_ragged, seeds
from tensordict import TensorDict
from torch import Tensor
from verl import DataProto
from verl.trainer.config import AlgoConfig, RolloutCorrectionConfig
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.workers.config import ActorConfig, PolicyLossConfig

from regress.grpo.advantages import token_advantages
from regress.grpo.aggregation import batch_weights, token_weights
from regress.grpo.catalogue import REJECTIONS
from regress.grpo.controllers import adapted_kl_coef
from regress.grpo.corrections import accepted, sampler_weights
from regress.grpo.kl import kl_estimate
from regress.grpo.losses import TokenLoss, token_loss
from regress.grpo.marks import Compared, covariances, draw_order
from regress.grpo.named_metrics import verl_metrics
from regress.grpo.objective import Objective
from regress.grpo.presets import make_objective
from regress.grpo.resampling import PF_PPO_METHODS, resampling_weights, varied_groups
from regress.grpo.samples import Samples
from regress.grpo.values import gae, value_loss

pytestmark = pytest.mark.filterwarnings("ignore")
quick = settings(deadline=None, max_examples=20, suppress_health_check=list(HealthCheck))

LOSSES: dict[str, dict[str, Any]] = {
    "vanilla": {"preset": "verl:token-mean"},
    "dppo_tv": {"preset": "verl:dppo_tv"},
    "dppo_kl": {"preset": "verl:dppo_kl"},
    "gspo": {"preset": "verl:gspo"},
    "sapo": {"preset": "verl:sapo"},
    "gpg": {"preset": "verl:gpg"},
    "clip_cov": {"preset": "verl:clip_cov"},
    "kl_cov": {"preset": "verl:kl_cov"},
    "geo_mean": {"preset": "verl:geo_mean"},
    # verl has no default of dro_beta, so there is no preset of it
    "dro": {"preset": "verl:token-mean", "loss": "dro", "dual_clip": None, "dro_beta": 0.7},
    "cispo": {"preset": "verl:cispo"},
    "bypass_mode": {"preset": "verl:bypass_mode"},
}
ESTIMATORS = {name: f"verl:{name}" for name in core_algos.ADV_ESTIMATOR_REGISTRY if name != "grpo"} | {
    "grpo": "verl:token-mean"
}
FIXED_AGGREGATION = ("sapo", "geo_mean")


def aggregations() -> set[str]:
    return {name for name in compared_texts(core_algos.agg_loss) if "-" in name}


def test_every_loss_of_verl_is_compared_and_every_aggregation_of_its_actor() -> None:
    """The other names are those of test_names.py."""
    assert not unknown("verl", "policy losses", core_algos.POLICY_LOSS_REGISTRY, LOSSES)
    names = compared_texts(ActorConfig.__post_init__)
    assert {name for name in names if "-mean" in name or "-sum" in name} <= aggregations()


def actor(ragged: Ragged, mode: str, **fields: Any) -> ActorConfig:
    config = ActorConfig(strategy="fsdp", rollout_n=3, ppo_micro_batch_size_per_gpu=1, **fields)
    config.global_batch_info.update(
        dp_size=1,
        batch_num_tokens=int(ragged.mask.sum()),
        global_batch_size=ragged.rows,
        loss_scale_factor=None,
    )
    return config


def both_losses(
    ragged: Ragged,
    mode: str,
    objective: Objective,
    config: ActorConfig,
    *,
    weighed: bool,
    spread: float = 0.6,
    patch: Callable[[Ragged, Tensor, Tensor, Tensor, Objective], Any] | None = None,
) -> tuple[Tensor, Tensor, dict[str, Any], Tensor, Tensor, TokenLoss]:
    """Their loss, its gradient and metrics, and ours."""
    old, advantages = ragged.log_probs(), ragged.normal()
    if mode == "geo_mean":
        advantages = advantages[:, :1].expand_as(advantages).contiguous()
    log_probs = (old + ragged.normal(spread)).clamp(max=-1e-3)
    weights = ragged.normal().exp() if weighed else None
    theirs = log_probs.clone().requires_grad_()
    if patch is not None:
        patch(ragged, log_probs, old, advantages, objective)
    their_loss, metrics = core_algos.get_policy_loss_fn(mode)(
        old_log_prob=old,
        log_prob=theirs,
        advantages=advantages,
        response_mask=ragged.mask.bool() if mode != "bypass_mode" else ragged.mask,
        loss_agg_mode=config.loss_agg_mode,
        config=config,
        rollout_is_weights=weights,
    )
    (their_gradient,) = torch.autograd.grad(their_loss, theirs)
    ours = log_probs.clone().requires_grad_()
    loss = token_loss(
        ragged.flat(ours),
        ragged.flat(old),
        ragged.flat(advantages),
        ragged.sequence,
        ragged.rows,
        objective,
        sampler_log_probs_K=ragged.flat(old),
        correction_K=None if weights is None else ragged.flat(weights),
    )
    shares = batch_weights(
        ragged.sequence,
        ragged.rows,
        objective,
        max_completion_length=ragged.mask.shape[1],
        partition=[range(ragged.rows)],
        completion_lengths=ragged.lengths.tolist(),
    )
    our_loss = (shares * loss.loss_K).sum()
    (our_gradient,) = torch.autograd.grad(our_loss, ours)
    return their_loss, their_gradient, metrics, our_loss, our_gradient, loss


def assert_same(mode: str, aggregation: str, found: tuple[Any, ...]) -> None:
    """Within 1e-12, or where their mean over a sample adds 1e-8 to the number of its tokens, 1e-7."""
    their_loss, their_gradient, _, our_loss, our_gradient, _ = found
    tolerance = 1e-7 if "seq-mean-token-mean" in (aggregation, mode) or mode in FIXED_AGGREGATION else 1e-12
    scale = max(float(their_gradient.norm()), 1e-30)
    assert float((our_gradient - their_gradient).norm()) <= tolerance * scale
    torch.testing.assert_close(our_loss, their_loss, rtol=10 * tolerance, atol=tolerance)


@pytest.mark.parametrize("mode", [mode for mode in LOSSES if mode != "bypass_mode"])
@quick
@given(seed=seeds, data=st.data())
def test_policy_losses(mode: str, seed: int, data: st.DataObject) -> None:
    aggregation = data.draw(st.sampled_from(sorted(aggregations())))
    if mode in FIXED_AGGREGATION:
        aggregation = "seq-mean-token-mean"
    low, high = data.draw(st.floats(0.01, 0.6)), data.draw(st.floats(0.01, 0.6))
    c, weighed = data.draw(st.floats(1.05, 4.0)), data.draw(st.booleans())
    tau = data.draw(st.floats(0.3, 3.0)), data.draw(st.floats(0.3, 3.0))
    share, bound = data.draw(st.sampled_from([1e-3, 0.1, 0.4])), data.draw(st.floats(-1.0, 0.2))
    ragged = make_ragged(seed, empty=mode not in ("clip_cov", "kl_cov") and data.draw(st.booleans()))
    fields: dict[str, Any] = {"clip_low": low, "clip_high": high, "aggregation": aggregation}
    loss = {
        "loss_mode": mode,
        "clip_cov_ratio": share,
        "clip_cov_lb": bound,
        "clip_cov_ub": 2.0,
        "kl_cov_ratio": share,
        "ppo_kl_coef": 0.3,
        "dro_beta": 0.7,
    }
    own: dict[str, dict[str, Any]] = {
        "vanilla": {"dual_clip": c},
        "dppo_tv": {"delta": c},
        "dppo_kl": {"delta": c},
        "sapo": {"sapo_tau_pos": tau[0], "sapo_tau_neg": tau[1]},
        "clip_cov": {"cov_fraction": share, "cov_low": bound, "cov_high": 2.0},
        "kl_cov": {"cov_fraction": share, "cov_kl_coef": 0.3},
    }
    fields |= own.get(mode, {})
    if weighed:
        fields |= {"sampler_correction": "token_truncate", "correction_max": 1e9}
    objective = make_objective(**(LOSSES[mode] | fields))
    config = actor(
        ragged,
        mode,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=c,
        loss_agg_mode=aggregation,
        tau_pos=tau[0],
        tau_neg=tau[1],
        policy_loss=PolicyLossConfig(**loss),
    )
    with pytest.MonkeyPatch.context() as patch:
        found = both_losses(
            ragged,
            mode,
            objective,
            config,
            weighed=weighed,
            patch=(lambda *args: same_draw(patch, *args)) if mode == "clip_cov" else None,
        )
    assert_same(mode, aggregation, found)
    _, _, metrics, _, _, ours = found
    named = verl_metrics(ours, objective)
    for name, value in metrics.items():
        assert named[name].value == pytest.approx(float(value), rel=1e-6, abs=1e-7), name


def same_draw(
    patch: pytest.MonkeyPatch, ragged: Ragged, new: Tensor, old: Tensor, adv: Tensor, objective: Objective
) -> None:
    """Let verl draw its candidates in our order of all tokens."""
    flat = [ragged.flat(values) for values in (new, old, adv)]
    tokens = Compared(flat[0], flat[1], flat[2], Samples(ragged.sequence, ragged.rows))
    cov, ratio = covariances(tokens), (flat[0] - flat[1]).exp()
    clipped = -flat[2] * ratio.clamp(*objective.clip_range) > -flat[2] * ratio
    candidates = (cov > objective.cov_low) & (cov < objective.cov_high) & ~clipped
    rank = draw_order(len(cov), objective.cov_seed).argsort()[candidates]

    right = torch.randperm

    def order(count: int, **rest: Any) -> Tensor:
        if rest:  # ours, which has a generator of its own
            return right(count, **rest)
        assert count == len(rank)
        return rank.argsort()

    patch.setattr(core_algos.torch, "randperm", order)


@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
@quick
@given(seed=seeds, data=st.data())
def test_bypass_mode(loss_type: str, seed: int, data: st.DataObject) -> None:
    ragged = make_ragged(seed)
    level = data.draw(st.sampled_from(["token", "sequence"]))
    bounds = data.draw(st.sampled_from(["1.5", "0.6_1.5"]))
    normalize = data.draw(st.booleans())
    rejection = data.draw(
        st.sampled_from([None, "token_k1", "seq_mean_k1", "seq_max_k3", "seq_sum_k2,token_k3"])
    )
    aggregation = data.draw(st.sampled_from(["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]))
    correction = RolloutCorrectionConfig(
        bypass_mode=True,
        loss_type=loss_type,
        rollout_is=level,
        rollout_is_threshold=bounds if "_" in bounds else float(bounds),
        rollout_is_batch_normalize=normalize,
        rollout_rs=rejection,
        rollout_rs_threshold=None if rejection is None else "1.4",
    )
    config = actor(
        ragged,
        "bypass_mode",
        loss_agg_mode=aggregation,
        policy_loss=PolicyLossConfig(loss_mode="bypass_mode", rollout_correction=correction),
    )
    fields: dict[str, Any] = {"preset": "verl:bypass_mode", "aggregation": aggregation}
    if loss_type == "reinforce":
        rule, low = ("mask", 0.6) if "_" in bounds else ("truncate", None)
        fields |= {"preset": "verl:bypass_mode-reinforce", "sampler_correction": f"{level}_{rule}"}
        fields |= {"correction_min": low, "correction_max": 1.5, "correction_normalize": normalize}
    if rejection is not None:
        fields |= {
            "rejection": ",".join(f"{one}:1.4" for one in rejection.split(",")),
            "correction_policy": "current",
        }
    found = both_losses(ragged, "bypass_mode", make_objective(**fields), config, weighed=False, spread=0.3)
    _, their_gradient, _, _, our_gradient, _ = found
    # their normalization adds 1e-8 to the number of tokens
    assert float((our_gradient - their_gradient).norm()) <= 1e-6 * max(float(their_gradient.norm()), 1e-9)
    torch.testing.assert_close(found[3], found[0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ESTIMATORS)
@quick
@given(seed=seeds, data=st.data())
def test_estimators(name: str, seed: int, data: st.DataObject) -> None:
    ragged = make_ragged(seed, empty=data.draw(st.booleans()))
    if data.draw(st.booleans()) and name != "grpo_passk":
        ragged.groups[-1] = 99  # alone in its group
    gamma, lam, norm = (
        data.draw(st.floats(0.5, 1.0)),
        data.draw(st.floats(0.0, 1.0)),
        data.draw(st.booleans()),
    )
    fields: dict[str, Any] = {}
    scaled = name in ("grpo", "grpo_vectorized", "grpo_passk", "gdpo")
    if scaled and not norm:
        fields["scale"] = "none"
    if name in ("reinforce_plus_plus", "gae"):
        fields["gamma"] = gamma
    if name == "gae":
        fields["lam"] = lam
    objective = make_objective(ESTIMATORS[name], **fields)
    old, values = ragged.log_probs(), ragged.normal()
    squares = old.exp().square() + 0.2 * torch.rand(
        old.shape, generator=ragged.generator, dtype=torch.float64
    )
    baselines = torch.rand(ragged.rows, generator=ragged.generator, dtype=torch.float64)
    weights = ragged.normal(0.3).exp() if data.draw(st.booleans()) else None
    penalty = ragged.normal(0.2) * ragged.mask if name != "gdpo" and data.draw(st.booleans()) else None
    rewards = ragged.token_rewards if penalty is None else ragged.token_rewards - penalty
    components = torch.rand(ragged.rows, 2, generator=ragged.generator, dtype=torch.float64).float().double()
    tensors = rewards, old, squares, values, baselines, weights, components
    theirs = their_advantages(name, ragged, *tensors, gamma, lam, norm)
    ours = token_advantages(
        components if name == "gdpo" else ragged.scores,
        ragged.groups,
        ragged.sequence,
        objective,
        None if penalty is None else ragged.flat(penalty),
        reward_weights=[1.0, 0.5] if name == "gdpo" else None,
        baselines_N=baselines,
        values_K=ragged.flat(values),
        old_log_probs_K=ragged.flat(old),
        sum_pi_squared_K=ragged.flat(squares),
        correction_K=None if weights is None else ragged.flat(weights),
        position_K=torch.nonzero(ragged.mask)[:, 1],
    )
    # whitening adds 1e-8 to the number of tokens; gdpo and grpo_vectorized compute in float32
    rounded = ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae", "gdpo", "grpo_vectorized")
    # gpg has a factor, and grpo the deviation of a sample that is alone, in float32
    tolerance = 1e-5 if name in rounded else 1e-7 if name in ("gpg", "grpo") else 1e-12
    torch.testing.assert_close(ours, ragged.flat(theirs).double(), rtol=tolerance, atol=tolerance)


def their_advantages(
    name: str,
    ragged: Ragged,
    rewards: Tensor,
    old: Tensor,
    squares: Tensor,
    values: Tensor,
    baselines: Tensor,
    weights: Tensor | None,
    components: Tensor,
    gamma: float,
    lam: float,
    norm: bool,
) -> Tensor:
    function = core_algos.get_adv_estimator_fn(name)
    mask, index = ragged.mask, np.array([str(group) for group in ragged.groups.tolist()], dtype=object)
    if name == "gae":
        return function(rewards, values, mask, gamma, lam)[0]
    config = AlgoConfig(gamma=gamma, norm_adv_by_std_in_grpo=norm)
    given: dict[str, Any] = {"token_level_rewards": rewards.clone(), "response_mask": mask, "config": config}
    if name in ("grpo", "grpo_vectorized"):
        given["norm_adv_by_std_in_grpo"] = norm
    if name not in ("reinforce_plus_plus",):
        given["index"] = index
    if name == "remax":
        given["reward_baselines"] = baselines
    if name.endswith("optimal_token_baseline"):
        given |= {"old_log_probs": old, "sum_pi_squared": squares, "rollout_is_weights": weights}
    if name == "gdpo":
        given["config"] = AlgoConfig(gdpo_reward_keys=["a", "b"], gdpo_reward_weights=[1.0, 0.5])
        given["norm_adv_by_std_in_grpo"] = norm
        given["non_tensor_batch"] = {"a": components[:, 0].numpy(), "b": components[:, 1].numpy()}
        attention = torch.cat(
            [torch.ones(ragged.rows, 2), (torch.arange(mask.shape[1]) < ragged.lengths[:, None])], 1
        )
        given["batch"] = {"prompts": torch.ones(ragged.rows, 2), "attention_mask": attention.long()}
        # verl counts a component only where the completion's last token is one of the loss
    return function(**given)[0]


@pytest.mark.parametrize("plus", ["", "+"])
@pytest.mark.parametrize("name", KL)
@quick
@given(seed=seeds)
def test_kl(name: str, plus: str, seed: int) -> None:
    ragged = make_ragged(seed)
    log_probs, reference = ragged.log_probs(), ragged.log_probs() + ragged.normal(3.0)
    reference[0, 0] = log_probs[0, 0] + 30.0
    estimator = KL[name] if KL[name] == "k2" else KL[name] + plus
    objective = make_objective("verl:token-mean", kl_coef=1.0, kl_estimator=estimator)
    results = []
    for function in (
        lambda leaf: core_algos.kl_penalty(leaf, reference, name + plus),
        lambda leaf: kl_estimate(leaf, reference, objective),
    ):
        leaf = log_probs.clone().requires_grad_()
        value = function(leaf)
        results.append((value.detach(), torch.autograd.grad(value.sum(), leaf)[0]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("aggregation", sorted(aggregations()))
@pytest.mark.parametrize("local", [False, True])
@quick
@given(seed=seeds, scale=st.none() | st.integers(1, 20))
def test_aggregations(aggregation: str, local: bool, seed: int, scale: int | None) -> None:
    ragged = make_ragged(seed, empty=True)
    values = ragged.normal()
    normed = aggregation == "seq-mean-token-sum-norm"
    theirs = core_algos.agg_loss(
        values,
        ragged.mask,
        aggregation,
        batch_num_tokens=None if local else int(ragged.mask.sum()),
        global_batch_size=None if local else ragged.rows,
        loss_scale_factor=scale if normed else None,
    )
    objective = make_objective(
        aggregation=aggregation, norm_length=scale if normed else None, count_empty_rows=not local
    )
    weights = token_weights(
        ragged.sequence, ragged.rows, objective, max_completion_length=ragged.mask.shape[1]
    )
    tolerance = 1e-7 if aggregation == "seq-mean-token-mean" else 1e-12
    torch.testing.assert_close((weights * ragged.flat(values)).sum(), theirs, rtol=tolerance, atol=tolerance)


@quick
@given(seed=seeds, size=st.integers(1, 4))
def test_rows_that_are_not_padded_divide_by_the_longest_of_their_microbatch(seed: int, size: int) -> None:
    """The trainer v1: each microbatch is padded to its own longest response."""
    ragged = make_ragged(seed)
    values = ragged.normal()
    parts = [list(range(at, min(at + size, ragged.rows))) for at in range(0, ragged.rows, size)]
    theirs = torch.zeros((), dtype=torch.float64)
    for part in parts:
        rows = [
            torch.nested.as_nested_tensor([x[i, : ragged.lengths[i]] for i in part], layout=torch.jagged)
            for x in (values, ragged.mask)
        ]
        micro = TensorDict({"loss": rows[0], "mask": rows[1]}, batch_size=[len(part)]).to_padded_tensor()
        theirs += core_algos.agg_loss(
            micro["loss"], micro["mask"], "seq-mean-token-sum-norm", global_batch_size=ragged.rows
        )
    weights = batch_weights(
        ragged.sequence,
        ragged.rows,
        make_objective("verl:seq-mean-token-sum-norm-v1"),
        max_completion_length=ragged.mask.shape[1],
        partition=parts,
        completion_lengths=ragged.lengths.tolist(),
    )
    torch.testing.assert_close((weights * ragged.flat(values)).sum(), theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("level", ["token", "sequence"])
@quick
@given(seed=seeds, normalize=st.booleans(), icepop=st.booleans())
def test_sampler_weights(level: str, seed: int, normalize: bool, icepop: bool) -> None:
    ragged = make_ragged(seed, empty=True)
    gap = ragged.normal(0.5)
    gap[0, 0] = 40.0
    theirs, _ = rollout_corr_helper.compute_rollout_correction_weights(
        gap, ragged.mask, level, "0.5_1.5" if icepop else 1.5, normalize
    )
    objective = make_objective(
        "verl:token-mean",
        sampler_correction=f"{level}_{'mask' if icepop else 'truncate'}",
        correction_min=0.5 if icepop else None,
        correction_max=1.5,
        correction_normalize=normalize,
    )
    flat = ragged.flat(gap)
    ours = sampler_weights(flat, torch.zeros_like(flat), ragged.sequence, ragged.rows, objective)
    tolerance = 1e-7 if normalize else 1e-12
    torch.testing.assert_close(ours, ragged.flat(theirs), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("criterion", sorted(REJECTIONS))
@quick
@given(seed=seeds, high=st.floats(1.01, 3.0), both=st.booleans())
def test_rejection(criterion: str, seed: int, high: float, both: bool) -> None:
    ragged = make_ragged(seed, empty=True)
    gap = ragged.normal(0.4)
    ratio = criterion.endswith("k1")
    bound = high if ratio else (high - 1.0) / 2
    their_bounds = f"0.7_{bound}" if ratio and both else str(bound)
    theirs, _ = rollout_corr_helper.compute_rollout_rejection_mask(gap, ragged.mask, criterion, their_bounds)
    objective = make_objective("verl:token-mean", rejection=f"{criterion}:{their_bounds.replace('_', ':')}")
    flat = ragged.flat(gap)
    ours = accepted(flat, torch.zeros_like(flat), Samples(ragged.sequence, ragged.rows), objective)
    assert torch.equal(ours, ragged.flat(theirs).bool())


@quick
@given(seed=seeds, clip=st.floats(0.0, 1.0))
def test_value_loss(seed: int, clip: float) -> None:
    ragged = make_ragged(seed)
    old, returns, new = ragged.normal(), ragged.normal(), ragged.normal()
    leaves = [new.clone().requires_grad_() for _ in range(2)]
    theirs, share = core_algos.compute_value_loss(leaves[0], returns, old, ragged.mask, clip)
    losses, clipped = value_loss(*(ragged.flat(each) for each in (leaves[1], old, returns)), clip)
    torch.testing.assert_close(losses.mean(), theirs, rtol=1e-12, atol=1e-12)
    assert float(clipped.double().mean()) == pytest.approx(float(share), abs=1e-6)
    gradients = [
        torch.autograd.grad(loss, leaf)[0] for loss, leaf in zip((theirs, losses.mean()), leaves, strict=True)
    ]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-12, atol=1e-12)


@quick
@given(seed=seeds)
def test_returns_of_gae(seed: int) -> None:
    ragged = make_ragged(seed)
    values = ragged.normal()
    theirs = core_algos.compute_gae_advantage_return(ragged.token_rewards, values, ragged.mask, 0.9, 0.8)[1]
    objective = make_objective("verl:gae", gamma=0.9, lam=0.8)
    _, ours = gae(ragged.flat(ragged.token_rewards), ragged.flat(values), ragged.sequence, objective)
    torch.testing.assert_close(ours, ragged.flat(theirs), rtol=1e-12, atol=1e-12)


@quick
@given(
    coefficient=st.floats(0.001, 1.0),
    kl=st.floats(0.0, 3.0),
    samples=st.integers(1, 512),
    target=st.floats(0.01, 1.0),
    horizon=st.integers(100, 10000),
)
def test_adaptive_kl(coefficient: float, kl: float, samples: int, target: float, horizon: int) -> None:
    controller = core_algos.AdaptiveKLController(coefficient, target, horizon)
    controller.update(kl, samples)
    objective = make_objective(
        kl_coef=coefficient, kl_controller="adaptive", kl_target=target, kl_horizon=horizon
    )
    assert adapted_kl_coef(coefficient, kl, samples, objective) == pytest.approx(controller.value, rel=1e-14)


@pytest.mark.parametrize("method", PF_PPO_METHODS)
@quick
@given(seed=seeds, power=st.floats(0.5, 3.0))
def test_pf_ppo(method: str, seed: int, power: float) -> None:
    ragged = make_ragged(seed)
    seen: list[Tensor] = []
    data = DataProto.from_dict(tensors={"token_level_scores": ragged.token_rewards})
    with pytest.MonkeyPatch.context() as patch:
        right = torch.multinomial

        def watched(weights: Tensor, *args: Any, **rest: Any) -> Tensor:
            seen.append(weights)
            return right(weights, *args, **rest)

        patch.setattr(core_algos.torch, "multinomial", watched)
        core_algos.compute_pf_ppo_reweight_data(data, method, power)
    ours = resampling_weights(ragged.scores, method, power)
    torch.testing.assert_close(ours.float(), seen[0].float(), rtol=1e-6, atol=1e-12)


def test_groups_that_dynamic_sampling_keeps() -> None:
    """The rule of ``ReplayBuffer._dapo_filtered_keys``: the standard deviation of several values is 0."""
    scores = torch.tensor([0.5, 0.5, 1.0, 0.0, 0.3, 0.7, 0.7])
    groups = torch.tensor([7, 7, 2, 2, 5, 4, 4])
    filtered = {
        group
        for group in groups.tolist()
        if (groups == group).sum() > 1 and float(np.std(scores[groups == group].numpy())) == 0.0
    }
    kept = varied_groups(scores, groups)
    assert {int(group) for group in groups[~kept]} == filtered == {7, 4}
