"""Taps of the training step: the engine's only instrumentation.

With no recorder active every function returns at once. Token quantities are recorded as local ``[B, T]`` tensors
under the microbatch's layout, each value at its own token, 0 where there is none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from regress.dump.record import LOSS_ROWS
from regress.dump.taps import current, tap, wanted
from regress.dump.trajectory import Trajectory
from regress.engine.local_tensor import local
from regress.engine.metric_table import reason_unjudged
from regress.engine.mini_batch import LossTokens, Microbatch, TokenBatch
from regress.grpo.objective import Objective
from regress.grpo.selective_log_softmax import TokenLogProbs
from regress.grpo.token_losses import TokenLoss, entropy_in_loss
from regress.grpo.update_metrics import Metric
from regress.layout import BatchPlan

if TYPE_CHECKING:
    from regress.engine.policy_interface import Policy

QUANTITIES = ("old_log_probs", "ref_log_probs")


def before_updates(
    trajectories: Sequence[Trajectory], batches: Sequence[tuple[TokenBatch, LossTokens]]
) -> None:
    """Tap log-probs of policy and reference before the first update: the whole rollout, right padded."""
    for quantity in QUANTITIES:
        values = [getattr(tokens, quantity) for _, tokens in batches]
        if not wanted(quantity) or any(value is None for value in values):
            continue
        masks = [mask for batch, _ in batches for mask in batch.loss_masks]
        (whole,) = TokenBatch(trajectories, loss_masks=masks).microbatches(BatchPlan())
        tensors = {quantity: whole.scatter(torch.cat(values).cpu())}
        tap(quantity, tensors, layout=whole.layout, meta=_at_targets(whole))


def number(index: int) -> int:
    """Return the number of a microbatch within its update: enclosing coordinates may name that of the first one."""
    where = current()
    return index if where is None or where.micro is None else where.micro + index


@torch.no_grad()
def inputs(micro: Microbatch) -> None:
    """Tap the model's inputs, and the layout of its activations."""
    meta: dict[str, Any] = {"samples": micro.samples_of(micro.layout)}
    if wanted("batch_inputs"):
        tap("batch_inputs", _batch_inputs(micro), layout=micro.layout, meta=meta)
    if wanted("activations"):
        meta["lm_head"] = LOSS_ROWS
        if micro.place.targets is not micro.layout:  # the rows follow the tokens that are predicted
            meta["rows"] = {"layout": micro.place.targets.to_json(), **_at_targets(micro)}
        tap("activations", layout=micro.layout, meta=meta)


@torch.no_grad()
def forward(micro: Microbatch, out: TokenLogProbs) -> None:
    """Tap the forward data of one microbatch, before its loss, which refuses values that are not finite."""
    if wanted("forward_data"):
        tap("forward_data", _forward_data(micro, out), layout=micro.place.targets, meta=_at_targets(micro))


@torch.no_grad()
def loss(
    micro: Microbatch,
    part: LossTokens,
    out: TokenLogProbs,
    terms: TokenLoss,
    share: Tensor,
    metrics: Mapping[str, Metric],
    whole: LossTokens,
    objective: Objective,
    backward_scale: float,
    router: float | None = None,
) -> None:
    """Tap the terms of one microbatch's loss token by token, and the loss.

    Args:
        router: its share of the load-balancing loss of routers, a part of the loss that is not a sum over loss tokens.
    """
    whole_share = share if router is None else share.double() + router
    meta = _at_targets(micro)
    layout = micro.place.targets
    if wanted("is_loss_debug"):
        tap("is_loss_debug", _loss_terms(micro, part, out, terms, whole_share), layout=layout, meta=meta)
    if wanted("loss"):
        meta |= _reduction(part, whole, objective, backward_scale)
        meta["metrics"] = {name: metric.value for name, metric in metrics.items()}
        meta["metric_parts"] = {name: [m.total, m.count, m.kind] for name, m in metrics.items()}
        beside = {} if router is None else {"router_loss": torch.tensor(router, dtype=torch.float64)}
        tap("loss", {**_loss(part, terms, whole_share), **beside}, layout=layout, meta=meta)


def gradients(policy: Policy, pattern: str) -> None:
    """Tap gradients after full accumulation, before clipping; parameters without one are left out."""
    if wanted("gradient"):
        named = _here(policy, pattern)
        found = {name: p.grad for name, p in named.items() if p.grad is not None}
        _tap_parts("gradient", policy, {name: (name, value) for name, value in found.items()})


def grad_norm(norm: Tensor) -> None:
    """Tap the total norm of the gradient before clipping, beside the gradients."""
    if wanted("gradient"):
        tap("gradient", meta={"grad_norm": norm.item()})


def after_update(policy: Policy, optimizer: Optimizer, pattern: str) -> None:
    """Tap updated parameters, and the optimizer's state as ``<parameter>/<state>``."""
    if not (wanted("param") or wanted("optimizer")):
        return
    named = _here(policy, pattern)
    _tap_parts("param", policy, {name: (name, value) for name, value in named.items()})
    if wanted("optimizer"):
        state = {
            f"{name}/{key}": (name, value)
            for name, parameter in named.items()
            for key, value in optimizer.state[parameter].items()
        }
        _tap_parts("optimizer", policy, state)


def metrics(values: Mapping[str, float]) -> None:
    """Tap the metrics of an update, each under its name; one without a value, such as the mean of nothing, has none."""
    _tap_numbers("metrics", values)


def step_metrics(values: Mapping[str, float | str]) -> None:
    """Tap the metrics of a rollout step, but for those that tell of no computation; see `UNJUDGED`."""
    _tap_numbers("step_metrics", values)


def _tap_numbers(stage: str, values: Mapping[str, float | str]) -> None:
    if wanted(stage):
        numbers = {name: value for name, value in values.items() if isinstance(value, float)}
        tap(stage, {n: v for n, v in numbers.items() if not math.isnan(v) and reason_unjudged(n) is None})


def _here(policy: Policy, pattern: str) -> dict[str, nn.Parameter]:
    """Return the parameters of this rank that match the pattern: a pipeline stage may hold none of them."""
    return {name: p for name, p in policy.named_parameters() if re.search(pattern, name)}


def _tap_parts(type: str, policy: Policy, tensors: Mapping[str, tuple[str, Tensor]]) -> None:
    """Tap tensors of parameters (gradients, states) by name, with the shard on this rank."""
    shards = {
        name: shard.to_json()
        for name, (parameter, value) in tensors.items()
        if value.dim() and (shard := policy.shard(parameter)) is not None
    }
    meta = {"shards": shards} if shards else None
    tap(type, {name: local(value) for name, (_, value) in tensors.items()}, meta=meta)


def _at_targets(micro: Microbatch) -> dict[str, Any]:
    return {"samples": micro.samples_of(micro.place.targets)}


def _batch_inputs(micro: Microbatch) -> dict[str, Tensor]:
    return {
        "input_ids": micro.input_ids,
        "position_ids": micro.position_ids,
        "attention_mask": torch.from_numpy(micro.layout.attention_mask),
        "response_mask": micro.response_mask,
    }


def _forward_data(micro: Microbatch, out: TokenLogProbs) -> dict[str, Tensor]:
    data = {"log_probs": out.log_probs, "entropy": out.entropy}
    scattered = {name: micro.scatter(value) for name, value in data.items() if value is not None}
    return {**scattered, "response_mask": micro.scatter(micro.effective), "input_ids": micro.target_ids}


def _loss_terms(
    micro: Microbatch, part: LossTokens, out: TokenLogProbs, terms: TokenLoss, share: Tensor
) -> dict[str, Tensor]:
    """Return the terms under the names of NexRL's weaver dump, followed by those it lacks."""
    values = {
        "log_probs": out.log_probs,
        "old_log_probs": part.old_log_probs,
        "advantages": part.advantages,
        "prob_ratio": terms.ratio_K,
        "elementwise_loss": terms.loss_K,
        "ref_log_probs": part.ref_log_probs,
        "policy_loss": terms.policy_K,
        "kl": terms.kl_K,
        "entropy_loss": entropy_in_loss(terms),
        "sampler_weights": terms.correction_K,
        "weights": part.weights,
    }
    scattered = {name: micro.scatter(value) for name, value in values.items() if value is not None}
    return {**scattered, "effective_valid": micro.scatter(micro.effective), "loss": share}


def _loss(part: LossTokens, terms: TokenLoss, share: Tensor) -> dict[str, Tensor]:
    """Return this microbatch's shares; they add up over microbatches and ranks to the loss of the mini-batch."""
    weights = part.weights
    assert weights is not None
    parts = {"pg_loss": terms.policy_K, "kl_loss": terms.kl_K, "entropy_loss": entropy_in_loss(terms)}
    shares = {name: (weights.to(v.dtype) * v).sum() for name, v in parts.items() if v is not None}
    return {"loss": share, **shares}


def _reduction(
    part: LossTokens, whole: LossTokens, objective: Objective, backward_scale: float
) -> dict[str, object]:
    """Return the reduction: the share is the sum over its tokens of weight times loss, times the scale when
    back-propagated.

    The weights hold the denominators; they are counted over the mini-batch unless the scope is the microbatch.
    """
    assert part.weights is not None
    return {
        "mini_batch_loss_tokens": len(whole),
        "mini_batch_sequences": whole.num_sequences,
        "weight_sum": part.weights.sum().item(),
        "aggregation": objective.aggregation,
        "denominator_scope": objective.denominator_scope,
        "num_loss_tokens": len(part),
        "num_sequences": part.num_sequences,
        "kl_coef": objective.kl_coef,
        "entropy_coef": objective.entropy_coef,
        "backward_scale": backward_scale,
    }
