"""What the training step hands to the dump: the engine's only instrumentation.

With no recorder active every function returns at once. Token quantities are recorded as local ``[B, T]`` tensors
under the microbatch's layout, each value at its own token, 0 where there is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from regress.dump.hooks import matching_parameters
from regress.dump.taps import tap, wanted
from regress.dump.trajectory import Trajectory
from regress.engine.batch import LossTokens, Microbatch, TokenBatch
from regress.engine.policy import Policy
from regress.grpo.logprobs import TokenLogProbs
from regress.grpo.losses import TokenLoss
from regress.grpo.metrics import Metric
from regress.grpo.objective import Objective
from regress.layout import BatchPlan

QUANTITIES = ("old_log_probs", "ref_log_probs")


def before_updates(
    trajectories: Sequence[Trajectory], batches: Sequence[tuple[TokenBatch, LossTokens]]
) -> None:
    """Log-probs of the policy and of the reference before the first update: the whole rollout, right padded."""
    for quantity in QUANTITIES:
        values = [getattr(tokens, quantity) for _, tokens in batches]
        if not wanted(quantity) or any(value is None for value in values):
            continue
        masks = [mask for batch, _ in batches for mask in batch.loss_masks]
        (whole,) = TokenBatch(trajectories, loss_masks=masks).microbatches(BatchPlan())
        tensors = {quantity: whole.scatter(torch.cat(values).cpu())}
        tap(quantity, tensors, layout=whole.layout, meta={"samples": whole.sample_ids})


@torch.no_grad()
def forward(micro: Microbatch, out: TokenLogProbs) -> None:
    """Inputs and forward data of one microbatch; before its loss, which refuses what is not finite."""
    meta = {"samples": micro.sample_ids}
    if wanted("batch_inputs"):
        tap("batch_inputs", _batch_inputs(micro), layout=micro.layout, meta=meta)
    if wanted("activations"):
        tap("activations", layout=micro.layout, meta={**meta, "lm_head": "rows of the loss tokens, in order"})
    if wanted("forward_data"):
        tap("forward_data", _forward_data(micro, out), layout=micro.layout, meta=meta)


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
) -> None:
    """The terms of the loss of one microbatch token by token, and the loss."""
    meta: dict[str, object] = {"samples": micro.sample_ids}
    layout = micro.layout
    if wanted("is_loss_debug"):
        tap("is_loss_debug", _loss_terms(micro, part, out, terms, share), layout=layout, meta=meta)
    if wanted("loss"):
        meta |= _reduction(part, whole, objective)
        meta["metrics"] = {name: metric.value for name, metric in metrics.items()}
        tap("loss", _loss(part, terms, share), layout=layout, meta=meta)


def gradients(policy: Policy, pattern: str) -> None:
    """Gradients after full accumulation, before clipping; parameters without one are left out."""
    if wanted("gradient"):
        named = matching_parameters(policy.named_parameters(), pattern)
        tap("gradient", {name: p.grad for name, p in named.items() if p.grad is not None})


def grad_norm(norm: Tensor) -> None:
    """Total norm of the gradient before clipping, beside the gradients."""
    if wanted("gradient"):
        tap("gradient", meta={"grad_norm": norm.item()})


def after_update(policy: Policy, optimizer: Optimizer, pattern: str) -> None:
    """Updated parameters, and the optimizer's state as ``<parameter>/<state>``."""
    if not (wanted("param") or wanted("optimizer")):
        return
    named = matching_parameters(policy.named_parameters(), pattern)
    tap("param", named)
    if wanted("optimizer"):
        state = {
            f"{name}/{key}": value
            for name, parameter in named.items()
            for key, value in optimizer.state[parameter].items()
        }
        tap("optimizer", state)


def _batch_inputs(micro: Microbatch) -> dict[str, Tensor]:
    return {
        "input_ids": micro.input_ids,
        "position_ids": micro.position_ids,
        "attention_mask": torch.from_numpy(micro.layout.attention_mask),
        "response_mask": _mask(micro),
    }


def _forward_data(micro: Microbatch, out: TokenLogProbs) -> dict[str, Tensor]:
    data = {"log_probs": out.log_probs, "entropy": out.entropy}
    scattered = {name: micro.scatter(value) for name, value in data.items() if value is not None}
    return {**scattered, "response_mask": _mask(micro), "input_ids": micro.input_ids}


def _loss_terms(
    micro: Microbatch, part: LossTokens, out: TokenLogProbs, terms: TokenLoss, share: Tensor
) -> dict[str, Tensor]:
    """The names are those of NexRL's weaver dump; what it lacks comes after them."""
    values = {
        "log_probs": out.log_probs,
        "old_log_probs": part.old_log_probs,
        "advantages": part.advantages,
        "prob_ratio": terms.ratio_K,
        "elementwise_loss": terms.loss_K,
        "ref_log_probs": part.ref_log_probs,
        "policy_loss": terms.policy_K,
        "kl": terms.kl_K,
        "entropy_loss": terms.entropy_K,
        "sampler_weights": terms.correction_K,
        "weights": part.weights,
    }
    scattered = {name: micro.scatter(value) for name, value in values.items() if value is not None}
    return {**scattered, "effective_valid": _mask(micro), "loss": share}


def _loss(part: LossTokens, terms: TokenLoss, share: Tensor) -> dict[str, Tensor]:
    """This microbatch's shares; they add up over microbatches and ranks to the loss of the mini-batch."""
    weights = part.weights
    assert weights is not None
    parts = {"pg_loss": terms.policy_K, "kl_loss": terms.kl_K, "entropy_loss": terms.entropy_K}
    shares = {name: (weights.to(v.dtype) * v).sum() for name, v in parts.items() if v is not None}
    return {"loss": share, **shares}


def _reduction(part: LossTokens, whole: LossTokens, objective: Objective) -> dict[str, object]:
    """How the share came about: sum over its tokens of weight times loss, back-propagated as it is.

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
        "backward_scale": 1.0,
    }


def _mask(micro: Microbatch) -> Tensor:
    return micro.scatter(torch.ones_like(micro.local))
