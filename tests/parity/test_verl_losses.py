"""Every loss and aggregation that verl names, on its own functions, in float64.

The names are read from verl's registries and from the source of its functions, so that a new one fails here.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from names import compared_texts, unknown
from ragged import Ragged, make_ragged, quick, seeds
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.config import RolloutCorrectionConfig
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig, PolicyLossConfig

from regress.grpo.loss_aggregation import batch_weights, token_weights
from regress.grpo.named_metrics import verl_metrics
from regress.grpo.objective import Objective
from regress.grpo.objective_presets import make_objective
from regress.grpo.token_losses import TokenLoss, token_loss
from regress.grpo.token_samples import Samples
from regress.grpo.token_selection import Compared, covariances, draw_order

pytestmark = pytest.mark.filterwarnings("ignore")

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
    objective = make_objective(**fields)
    found = both_losses(ragged, "bypass_mode", objective, config, weighed=False, spread=0.3)
    _, their_gradient, metrics, _, our_gradient, ours = found
    # their normalization adds 1e-8 to the number of tokens
    assert float((our_gradient - their_gradient).norm()) <= 1e-6 * max(float(their_gradient.norm()), 1e-9)
    torch.testing.assert_close(found[3], found[0], rtol=1e-6, atol=1e-7)
    for name, metric in verl_metrics(ours, objective).items():
        if name in metrics and metric.count:
            assert metric.value == pytest.approx(float(metrics[name]), rel=1e-6, abs=1e-7), name


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
