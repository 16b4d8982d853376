"""Every loss type of TRL under random settings: its own ``_compute_loss`` on random log-probs, in float64.

The trainers' batches and forward passes are those of test_trl.py; here log-probs and entropies are given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parity_world import MAX_COMPLETION_LENGTH, World
from ragged import Ragged, make_ragged, seeds
from torch import Tensor
from trl_objective import LEVELS, LOSS_TYPES, make_trainer

from regress.grpo.coefficient_controllers import Coefficients
from regress.grpo.loss_aggregation import batch_weights, entropy_scale, entropy_weights
from regress.grpo.named_metrics import trl_metrics
from regress.grpo.objective import Objective
from regress.grpo.objective_presets import make_objective
from regress.grpo.token_losses import TokenLoss, token_loss

pytestmark = pytest.mark.filterwarnings("ignore")
random = settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def grpo(world: World, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_trainer("grpo", world, tmp_path_factory.mktemp("grpo"), [lambda **_: []])


@pytest.fixture(scope="module")
def rloo(world: World, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_trainer("rloo", world, tmp_path_factory.mktemp("rloo"), [lambda **_: []])


@dataclass(frozen=True)
class Drawn:
    """Settings in TRL's words, of the trainer and of its arguments, and in ours."""

    trainer: dict[str, Any]
    args: dict[str, Any]
    ours: dict[str, Any]


def drawn(data: st.DataObject, loss_type: str) -> Drawn:
    """Draw settings that ``loss_type`` may have."""
    positive = st.floats(0.2, 3.0)
    level = data.draw(st.sampled_from(LEVELS))
    low, high = data.draw(st.floats(0.01, 0.6)), data.draw(st.floats(0.01, 3.0))
    trainer: dict[str, Any] = {
        "loss_type": loss_type,
        "importance_sampling_level": level,
        "epsilon_low": low,
        "epsilon_high": high,
        "beta": data.draw(st.sampled_from([0.0, 0.3])),
        "top_entropy_quantile": data.draw(st.sampled_from([1.0, 0.5, 0.2])),
        "off_policy_mask_threshold": data.draw(st.none() | st.floats(0.0, 0.5)),
        "entropy_coef": data.draw(st.sampled_from([0.0, 0.2])),
        "use_adaptive_entropy": False,
    }
    trainer["_entropy_bonus_enabled"] = trainer["entropy_coef"] != 0.0
    args: dict[str, Any] = {
        "delta": data.draw(st.none() | st.floats(1.05, 2.0)),
        "use_bias_correction_kl": data.draw(st.booleans()),
        "sapo_temperature_pos": data.draw(positive),
        "sapo_temperature_neg": data.draw(positive),
    } | {f"vespo_{name}": data.draw(positive) for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")}
    names = {"off_policy_mask_threshold": "off_policy_threshold", "beta": "kl_coef"}
    ours: dict[str, Any] = {
        names.get(name, name): trainer[name]
        for name in ("beta", "top_entropy_quantile", "off_policy_mask_threshold", "entropy_coef")
    }
    ours |= {"importance_level": level, "kl_bias_correction": args["use_bias_correction_kl"]}
    ours |= {"clip_low": 0.0 if loss_type == "cispo" else low, "clip_high": high}
    if loss_type == "sapo":
        ours |= {
            "sapo_tau_pos": args["sapo_temperature_pos"],
            "sapo_tau_neg": args["sapo_temperature_neg"],
        }
    elif loss_type == "vespo":
        ours |= {name: value for name, value in args.items() if name.startswith("vespo")}
    elif loss_type != "cispo":
        ours["delta"] = args["delta"]
    return Drawn(trainer, args, ours)


@dataclass(frozen=True)
class Batch:
    """Random values of a microbatch, [B, T] each."""

    ragged: Ragged
    log_probs: Tensor
    entropy: Tensor
    old: Tensor
    reference: Tensor
    sampler: Tensor | None
    weights: Tensor | None
    advantages: Tensor


def make_batch(seed: int, data: st.DataObject, *, sequence_weights: bool) -> Batch:
    ragged = make_ragged(seed, empty=data.draw(st.booleans()))
    old = ragged.log_probs()
    log_probs = (old + ragged.normal(0.4)).clamp(max=-1e-3)
    weights = None
    if data.draw(st.booleans()):
        weights = ragged.normal(0.5).exp()
        weights[weights < data.draw(st.sampled_from([0.0, 0.5]))] = 0.0
        if sequence_weights and data.draw(st.booleans()):
            weights = weights[:, :1]
    advantages = torch.randn(ragged.rows, generator=ragged.generator, dtype=torch.float64)
    advantages[2] = 0.0
    sampler = old + ragged.normal(0.3) if data.draw(st.booleans()) else None
    if sampler is not None:
        sampler[0, 0] = torch.nan
    # TRL takes the quantile in float32
    entropy = 2 * torch.rand(ragged.mask.shape, generator=ragged.generator).double()
    return Batch(ragged, log_probs, entropy, old, old + ragged.normal(0.5), sampler, weights, advantages)


def their_loss(trainer: Any, batch: Batch, drawn: Drawn) -> tuple[Tensor, list[Tensor], dict[str, float]]:
    """Return TRL's loss, its gradients by log-probs and entropies, and its metrics."""
    mask = batch.ragged.mask
    leaves = [batch.log_probs.clone().requires_grad_(), batch.entropy.clone().requires_grad_()]
    prompts = torch.ones(batch.ragged.rows, 1, dtype=torch.long)
    inputs: dict[str, Any] = {
        "prompt_ids": prompts,
        "prompt_mask": prompts,
        "completion_ids": torch.ones_like(mask),
        "completion_mask": (torch.arange(mask.shape[1]) < batch.ragged.lengths[:, None]).long(),
        "tool_mask": mask,
        "advantages": batch.advantages,
        "old_per_token_logps": batch.old,
        "ref_per_token_logps": batch.reference,
        "num_items_in_batch": mask.sum(),
    }
    if batch.sampler is not None:
        inputs["sampling_per_token_logps"] = batch.sampler
    if batch.weights is not None:
        # as TRL makes them: exactly 1 where no token of the model is
        whole = batch.weights.shape[1] == 1
        inputs["importance_sampling_ratio"] = (
            batch.weights if whole else torch.where(mask.bool(), batch.weights, 1.0)
        )
    with pytest.MonkeyPatch.context() as patch:
        for name, value in drawn.trainer.items():
            patch.setattr(trainer, name, value)
        for name, value in drawn.args.items():
            patch.setattr(trainer.args, name, value)
        patch.setattr(trainer, "use_vllm", batch.weights is not None)
        patch.setattr(trainer, "vllm_importance_sampling_correction", True)
        patch.setattr(
            trainer, "_get_per_token_logps_and_entropies", lambda *_, **__: (leaves[0], leaves[1], None)
        )
        trainer._metrics["train"].clear()
        loss = trainer._compute_loss(trainer.model, inputs)
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    return loss, _gradients(loss, leaves), metrics


def _gradients(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if one is None else one for one, leaf in zip(found, leaves, strict=True)]


def our_loss(batch: Batch, objective: Objective) -> tuple[Tensor, list[Tensor], TokenLoss]:
    """Return our loss, its gradients by log-probs and entropies, and its parts."""
    ragged = batch.ragged
    leaves = [batch.log_probs.clone().requires_grad_(), batch.entropy.clone().requires_grad_()]
    whole: tuple[Any, ...] = (ragged.sequence, ragged.rows, objective)
    partition = [range(ragged.rows)]
    shares = batch_weights(*whole, max_completion_length=MAX_COMPLETION_LENGTH, partition=partition)
    entropies = entropy_weights(*whole, partition=partition)
    spread = None if batch.weights is None else batch.weights.expand_as(batch.old)
    loss = token_loss(
        ragged.flat(leaves[0]),
        ragged.flat(batch.old),
        ragged.flat(batch.advantages[:, None].expand_as(batch.old)),
        *whole,
        ref_log_probs_K=ragged.flat(batch.reference),
        sampler_log_probs_K=None if batch.sampler is None else ragged.flat(batch.sampler),
        entropy_K=ragged.flat(leaves[1]),
        entropy_scale_K=None if entropies is None else entropy_scale(shares, entropies),
        correction_K=None if spread is None else ragged.flat(spread),
    )
    total = (shares * loss.loss_K).sum()
    return total, _gradients(total, leaves), loss


def objective_of(loss_type: str, batch: Batch, drawn: Drawn) -> Objective:
    ours = dict(drawn.ours)
    if batch.weights is not None:
        level = "sequence" if batch.weights.shape[1] == 1 else "token"
        ours |= {"sampler_correction": f"{level}_mask", "correction_min": 1e-9}
    if batch.sampler is None and ours["off_policy_threshold"] is not None:
        ours["off_policy_reference"] = "old"
    return make_objective(LOSS_TYPES[loss_type], **ours)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@random
@given(seed=seeds, data=st.data())
def test_losses_gradients_and_metrics(grpo: Any, loss_type: str, seed: int, data: st.DataObject) -> None:
    chosen = drawn(data, loss_type)
    batch = make_batch(seed, data, sequence_weights=loss_type != "vespo")
    objective = objective_of(loss_type, batch, chosen)
    theirs, their_gradients, metrics = their_loss(grpo, batch, chosen)
    ours, our_gradients, loss = our_loss(batch, objective)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    for own, other in zip(our_gradients, their_gradients, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-11, atol=1e-13)
    named = trl_metrics(loss, batch.ragged.sequence, batch.ragged.rows, objective)
    # a sample without loss tokens has ratio 1, which TRL counts as clipped by a cap below
    empty = loss_type == "cispo" and objective.clip_high < 1.0 and 0 in batch.ragged.mask.sum(1)
    for name, metric in named.items():
        if empty and name == "cispo_clip_ratio":
            continue
        # TRL adds them up in float32
        assert metric.value == pytest.approx(metrics[name], rel=2e-6, abs=1e-6), name
    terms = {"policy_loss", "entropy_coef", "vespo/phi_seq_mean"}  # no metrics of clipping, KL or entropy
    assert set(metrics) - terms == set(named)


@random
@given(seed=seeds, data=st.data())
def test_rloo(rloo: Any, seed: int, data: st.DataObject) -> None:
    low, high = data.draw(st.floats(0.01, 0.6)), data.draw(st.floats(0.01, 3.0))
    ragged = make_ragged(seed, tools=False)
    old = ragged.log_probs()
    log_probs = (old + ragged.normal(0.3)).clamp(max=-1e-3)
    advantages = torch.randn(ragged.rows, generator=ragged.generator, dtype=torch.float64)
    entropy = torch.rand(ragged.mask.shape, generator=ragged.generator, dtype=torch.float64)
    batch = Batch(ragged, log_probs, entropy, old, old, None, None, advantages)
    leaves = [log_probs.clone().requires_grad_(), entropy.clone().requires_grad_()]
    prompts = torch.ones(ragged.rows, 1, dtype=torch.long)
    inputs = {
        "prompt_ids": prompts,
        "prompt_mask": prompts,
        "completion_ids": torch.ones_like(ragged.mask),
        "completion_mask": ragged.mask,
        "advantages": advantages,
        "old_logps": (old * ragged.mask).sum(1),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rloo, "epsilon_low", low)
        patch.setattr(rloo, "epsilon_high", high)
        patch.setattr(rloo, "_get_per_token_logps_and_entropies", lambda *_, **__: (*leaves, None))
        rloo._metrics["train"].clear()
        theirs = rloo._compute_loss(rloo.model, inputs)
    objective = make_objective("trl:rloo", kl_coef=0.0, clip_low=low, clip_high=high)
    ours, our_gradients, loss = our_loss(batch, objective)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(our_gradients[0], _gradients(theirs, leaves)[0], rtol=1e-11, atol=1e-13)
    metrics = {name: values[-1] for name, values in rloo._metrics["train"].items()}
    named = trl_metrics(loss, ragged.sequence, ragged.rows, objective)
    assert set(metrics) == set(named)
    for name, metric in named.items():
        assert metric.value == pytest.approx(metrics[name], rel=2e-6, abs=1e-6), name


@random
@given(data=st.data(), seed=seeds)
def test_adaptive_entropy(grpo: Any, seed: int, data: st.DataObject) -> None:
    """Six updates, one after the other: the coefficient of the next one follows the entropy of the last."""
    fields = {
        "entropy_target": data.draw(st.floats(0.3, 1.7)),
        "entropy_coef_min": 0.01,
        "entropy_coef_max": data.draw(st.floats(0.05, 0.2)),
        "entropy_coef_delta": data.draw(st.floats(0.01, 0.1)),
    }
    objective = make_objective("trl:dapo", entropy_controller="adaptive", entropy_coef=0.05, **fields)
    ours = Coefficients.of(objective)
    grpo.entropy_coef, grpo._last_world_entropy = 0.05, float("inf")
    for update in range(6):
        batch = make_batch(seed + update, data, sequence_weights=False)
        own = Drawn({"use_adaptive_entropy": True, "_entropy_bonus_enabled": True}, dict(fields), {})
        theirs, their_gradients, _ = their_loss(grpo, batch, own)
        used = make_objective("trl:dapo", entropy_coef=ours.entropy_in_use)
        if batch.weights is not None:
            used = make_objective(
                "trl:dapo",
                entropy_coef=ours.entropy_in_use,
                sampler_correction="token_mask",
                correction_min=1e-9,
            )
        loss, our_gradients, parts = our_loss(batch, used)
        torch.testing.assert_close(loss, theirs, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(our_gradients[1], their_gradients[1], rtol=1e-11, atol=1e-13)
        assert parts.entropy_K is not None
        ours.after_update(float(parts.entropy_K.mean()))
        assert grpo.entropy_coef == pytest.approx(ours.entropy, rel=1e-12)
