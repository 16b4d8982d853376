"""Refactorings of whole steps: passes, weights, sampling, clipping and exchanges."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from regress.dump.taps import at
from regress.engine import policy, sampling, taps, token_gradients, trainer
from regress.engine.batch import Microbatch
from regress.engine.policy import LocalPolicy
from regress.engine.precision import arithmetic
from regress.grpo import aggregation
from regress.grpo.advantages import token_advantages
from regress.grpo.logprobs import token_log_probs
from regress.parallel import all_gather, replicas, vocabulary
from regress.parallel.exchange import gather
from tests.faults.fault import fault
from tests.faults.inputs import projected
from tests.faults.optimizer import around_the_update
from tests.faults.patch import Patch

WIDE = ("float64", "float32")


@fault(category="A", kind="harmless", fresh=True, cases=("dense", "dr_grpo"), precisions=WIDE)
def lengths_by_sums_of_ones(patch: Patch) -> None:
    """Tokens of samples are counted by adding ones."""

    def other(sequence: Tensor, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int64).index_add(0, sequence, torch.ones_like(sequence))

    patch.setattr(aggregation, "segment_lengths", other)


@fault(category="H", kind="harmless", fresh=True, cases=("dr_grpo",), precisions=WIDE)
def entropy_of_expected_logits(patch: Patch) -> None:
    """The entropy is the log-sum-exp of the logits less their expectation."""
    right: Any = token_log_probs

    def other(logits: Tensor, *args: Any, temperature: float, entropy: Any = False, **rest: Any) -> Any:
        found = right(logits, *args, temperature=temperature, entropy=False, **rest)
        if not entropy:
            return found
        wide = logits / temperature
        own = wide.logsumexp(-1) - (wide.softmax(-1) * wide).sum(-1)
        return replace(found, entropy=own.detach() if entropy == "no_grad" else own)

    patch.setattr(policy, "token_log_probs", other)


@fault(
    category="T",
    kind="harmless",
    fresh=True,
    cases=("dense", "gpt2"),
    variants=("mbs4", "packed-mbs3"),
    precisions=WIDE,
)
def attention_by_hand(patch: Patch) -> None:
    """Attention as two products and a softmax, in place of torch's function."""

    def other(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if enable_gqa:
            times = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
        scores = query @ key.mT * (1.0 / math.sqrt(query.shape[-1]) if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        return scores.softmax(-1) @ value

    patch.setattr(functional, "scaled_dot_product_attention", other)


@fault(category="B", kind="harmless", fresh=True, cases=("dense", "dr_grpo"), precisions=WIDE)
def microbatches_from_the_last(patch: Patch) -> None:
    """The last microbatch is computed first."""

    def other(self: Any, micros: Sequence[Microbatch], loss: Any) -> list[Any]:
        results: dict[int, Any] = {}
        for index in reversed(range(len(micros))):
            with self._accumulating(last=index == 0):
                with at(micro=taps.number(index)):
                    taps.inputs(micros[index])
                    share, results[index] = loss(
                        micros[index], self._forward(micros[index], entropy=self._entropy)
                    )
                with arithmetic(self.dtype):
                    self._backward(share)
            token_gradients.write()
        return [results[index] for index in range(len(micros))]

    patch.setattr(LocalPolicy, "forward_backward", other)


@fault(category="R", kind="harmless", fresh=True, cases=("dense", "tied"), precisions=WIDE)
def gradients_asked_for(patch: Patch) -> None:
    """Gradients are asked of torch.autograd.grad, and added to those that are there."""

    def other(self: LocalPolicy, share: Tensor) -> None:
        own = [p for p in self.model.parameters() if p.requires_grad]
        for parameter, grad in zip(own, torch.autograd.grad(share, own, allow_unused=True), strict=True):
            if grad is not None:
                parameter.grad = grad.clone() if parameter.grad is None else parameter.grad + grad

    patch.setattr(LocalPolicy, "_backward", other)


@fault(category="M", kind="harmless", fresh=True, cases=("dense", "tied"), precisions=WIDE)
def decay_within_the_update(patch: Patch) -> None:
    """Decay and step are added up before they are taken off the parameter."""

    @torch.no_grad()
    def other(optimizer: Optimizer, update: Callable[[], None]) -> None:
        before = {p: p.clone() for group in optimizer.param_groups for p in group["params"]}
        decays = [group["weight_decay"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0
        update()
        for group, decay in zip(optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = decay
            for p in group["params"]:
                p.copy_(before[p] + ((p - before[p]) - group["lr"] * decay * before[p]))

    around_the_update(patch, other)


@fault(category="L", kind="harmless", fresh=True, cases=("dense", "gpt2"), precisions=WIDE)
def clipped_by_torch(patch: Patch) -> None:
    """torch.nn.utils.clip_grad_norm_."""

    def other(self: LocalPolicy, limit: float | None) -> Tensor:
        own = [p for _, p in self.named_parameters() if p.grad is not None]
        return nn.utils.clip_grad_norm_(own, math.inf if limit is None else limit)

    patch.setattr(LocalPolicy, "clip_grad_norm", other)


@fault(
    category="D",
    kind="harmless",
    fresh=True,
    variants=("cp2-gather", "dp2-cp2-gather-ddp-packed"),
    precisions=WIDE,
)
def keys_and_values_gathered_apart(patch: Patch) -> None:
    """Keys are gathered by one collective, and values by another."""
    right: Any = gather

    def other(pair: Tensor, *rest: Any) -> Tensor:
        return torch.stack([right(one, *rest) for one in pair], dim=1)

    patch.setattr(all_gather, "gather", other)


@fault(category="I", kind="harmless", fresh=True, cases=("dense", "dapo"), precisions=WIDE)
def rewards_as_a_column(patch: Patch) -> None:
    """Rewards are a column of one reward function."""
    right: Any = token_advantages

    def other(rewards: Tensor, *args: Any, **rest: Any) -> Tensor:
        return right(rewards.reshape(len(rewards), 1), *args, **rest)

    patch.setattr(trainer, "token_advantages", other)


@fault(
    category="G",
    kind="harmless",
    fresh=True,
    cases=("gpt2", "dense"),
    variants=("left-mbs3", "packed-mbs3"),
    precisions=WIDE,
)
def positions_by_segments(patch: Patch) -> None:
    """Position ids are written segment by segment."""

    def other(micro: Microbatch) -> Microbatch:
        ids = np.zeros(micro.layout.shape, dtype=np.int64)
        for segment in micro.layout.segments:
            stop = segment.col + segment.stop - segment.start
            ids[segment.row, segment.col : stop] = range(segment.start, segment.stop)
        return replace(micro, position_ids=torch.from_numpy(ids))

    projected(patch, other)


@fault(
    category="C",
    kind="harmless",
    fresh=True,
    variants=("tp2", "dp2-tp2-sp-packed"),
    precisions=WIDE,
)
def sums_of_parts_raised_one_by_one(patch: Patch) -> None:
    """Sums of exponentials of a part are made relative to 1 above the greatest maximum of all parts."""
    right: Any = vocabulary._joined

    def other(maximum: Tensor, sums: Tensor, group: Any) -> tuple[Tensor, Tensor]:
        if not maximum.numel():
            return maximum, sums
        highest, found = right(maximum, sums, group)
        total, moment, target, holders = found
        less = math.exp(-1.0)
        return highest + 1.0, torch.stack([total * less, (moment - total) * less, target, holders])

    patch.setattr(vocabulary, "_joined", other)


@fault(category="V", kind="harmless", fresh=True, cases=("rollout",), variants=("base",))
def draws_by_one_sum(patch: Patch) -> None:
    """A token is searched in the cumulative probabilities of the whole vocabulary at once."""

    def other(probs: Tensor, uniform: Tensor) -> Tensor:
        total = probs.cumsum(-1).cpu()
        chosen = (total <= (uniform * total[:, -1])[:, None]).sum(-1)
        last = probs.shape[1] - 1 - probs.flip(1).gt(0).int().argmax(-1).cpu()
        return chosen.minimum(last)

    patch.setattr(sampling, "inverse_cdf", other)


@fault(category="B", kind="harmless", fresh=True, variants=("dp2-ddp", "dp2-ddp-mbs2"), precisions=WIDE)
def buckets_of_another_size(patch: Patch) -> None:
    """DDP sums small buckets that are views of the gradients."""

    def other(model: nn.Module, group: Any) -> DistributedDataParallel:
        return DistributedDataParallel(
            model, process_group=group, bucket_cap_mb=1, gradient_as_bucket_view=True
        )

    patch.setattr(replicas, "distributed", other)
