"""Refactorings, written before their first run: none may be flagged."""

import functools
import math
from dataclasses import replace

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from regress.dump.taps import at
from regress.engine import attention, grpo_trainer, loss_token_gradients, sampling, step_taps
from regress.engine import causal_lm_policy as local_policy
from regress.engine import causal_lm_policy as policy
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.checkpoint import checkpoint_resume
from regress.engine.grpo_trainer import Trainer
from regress.engine.numeric_types import arithmetic
from regress.engine.reference_policy import Reference
from regress.engine.rollout_worker import HFRolloutWorker
from regress.engine.sampling import LogProbRecorder
from regress.engine.training_passes import _Losses
from regress.grpo import loss_aggregation
from regress.replay.fault_injection import around, by, in_place_of
from tests.faults.fault import harmless
from tests.faults.harmless.model import modules_of
from tests.faults.inputs import projected
from tests.faults.optimizer import around_the_update


@harmless("A", on="dense/mbs4 dr_grpo/mbs4", precisions="float64 float32")
@in_place_of(loss_aggregation, "segment_lengths")
def lengths_by_sums_of_ones(sequence, count):
    """Tokens of samples are counted by adding ones."""
    return torch.zeros(count, dtype=torch.int64).index_add(0, sequence, torch.ones_like(sequence))


@harmless("H", on="dr_grpo/mbs4", precisions="float64 float32")
@around(policy, "token_log_probs")
def entropy_of_expected_logits(right, logits, *args, temperature, entropy=False, **rest):
    """The entropy is the log-sum-exp of the logits less their expectation."""
    found = right(logits, *args, temperature=temperature, entropy=False, **rest)
    if not entropy:
        return found
    wide = logits / temperature
    own = wide.logsumexp(-1) - (wide.softmax(-1) * wide).sum(-1)
    return replace(found, entropy=own.detach() if entropy == "no_grad" else own)


@harmless("T", on="dense/mbs4 dense/packed-mbs3 gpt2/mbs4 gpt2/packed-mbs3", precisions="float64 float32")
@in_place_of(functional, "scaled_dot_product_attention")
def attention_by_hand(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """Attention as two products and a softmax, in place of torch's function."""
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


@harmless("B", on="dense/mbs4 dr_grpo/mbs4", precisions="float64 float32")
@in_place_of(LocalPolicy, "forward_backward")
def microbatches_from_the_last(self, micros, loss):
    """The last microbatch is computed first."""
    results = {}
    for index in reversed(range(len(micros))):
        with self._accumulating(last=index == 0):
            with at(micro=step_taps.number(index)):
                step_taps.inputs(micros[index])
                share, results[index] = loss(
                    micros[index], self._forward(micros[index], entropy=self._entropy)
                )
            with arithmetic(self.dtype):
                self._backward(share)
        loss_token_gradients.write()
    return [results[index] for index in range(len(micros))]


@harmless("R", on="dense/mbs4 tied/mbs4", precisions="float64 float32")
@in_place_of(LocalPolicy, "_backward")
def gradients_asked_for(self, share):
    """Gradients are asked of torch.autograd.grad, and added to those that are there."""
    own = [p for p in self.model.parameters() if p.requires_grad]
    for parameter, grad in zip(own, torch.autograd.grad(share, own, allow_unused=True), strict=True):
        if grad is not None:
            parameter.grad = grad.clone() if parameter.grad is None else parameter.grad + grad


@harmless("M", on="dense/mbs4 tied/mbs4", precisions="float64 float32")
@by(around_the_update)
@torch.no_grad()
def decay_within_the_update(optimizer, update):
    """Decay and step are added up before they are taken off the parameter."""
    before = {p: p.clone() for group in optimizer.param_groups for p in group["params"]}
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    update()
    for group, decay in zip(optimizer.param_groups, decays, strict=True):
        group["weight_decay"] = decay
        for p in group["params"]:
            p.copy_(before[p] + ((p - before[p]) - group["lr"] * decay * before[p]))


@harmless("L", on="dense/mbs4 gpt2/mbs4", precisions="float64 float32")
@in_place_of(LocalPolicy, "clip_grad_norm")
def clipped_by_torch(self, limit):
    """torch.nn.utils.clip_grad_norm_."""
    own = [p for _, p in self.named_parameters() if p.grad is not None]
    return nn.utils.clip_grad_norm_(own, math.inf if limit is None else limit)


@harmless("I", on="dense/mbs4 dapo/mbs4", precisions="float64 float32")
@around(grpo_trainer, "token_advantages")
def rewards_as_a_column(right, rewards, *args, **rest):
    """Rewards are a column of one reward function."""
    return right(rewards.reshape(len(rewards), 1), *args, **rest)


@harmless(
    "G", on="gpt2/left-mbs3 gpt2/packed-mbs3 dense/left-mbs3 dense/packed-mbs3", precisions="float64 float32"
)
@by(projected)
def positions_by_segments(micro):
    """Position ids are written segment by segment."""
    ids = np.zeros(micro.layout.shape, dtype=np.int64)
    for segment in micro.layout.segments:
        stop = segment.col + segment.stop - segment.start
        ids[segment.row, segment.col : stop] = range(segment.start, segment.stop)
    return replace(micro, position_ids=torch.from_numpy(ids))


@harmless("V", on="rollout/base")
@in_place_of(sampling, "inverse_cdf")
def draws_by_one_sum(probs, uniform):
    """A token is searched in the cumulative probabilities of the whole vocabulary at once."""
    total = probs.cumsum(-1).cpu()
    chosen = (total <= (uniform * total[:, -1])[:, None]).sum(-1)
    last = probs.shape[1] - 1 - probs.flip(1).gt(0).int().argmax(-1).cpu()
    return chosen.minimum(last)


@harmless(
    "U",
    on="dense/mbs4 dense/dp2-packed-budget48 dr_grpo/mbs4 dr_grpo/dp2-packed-budget48",
    precisions="float64 float32",
)
@around(_Losses, "part")
def shares_added_from_the_last(right, self, shares):
    """Shares of the loss and metrics of microbatches are added from the last one to the first."""
    return right(self, shares[::-1])


@harmless("V", on="rollout/base rollout/rollout-tp2")
@around(HFRolloutWorker, "complete")
def completions_sampled_one_by_one(right, self, prompts, params, keys, limits):
    """Each prompt of a batch is completed in a batch of its own, without any padding."""
    rows = zip(prompts, keys, limits, strict=True)
    return [one for prompt, key, limit in rows for one in right(self, [prompt], params, [key], [limit])]


@harmless("S", on="lora/mbs4 lora/packed-mbs3", precisions="float64 float32")
def factors_by_einsum(run):
    """Products with the factors of adapters are Einstein sums."""

    def forward(factor, x):
        return torch.einsum("...i,oi->...o", x, factor.weight)

    for layer in modules_of(run, lambda one: hasattr(one, "lora_A") and hasattr(one, "scaling")):
        for factor in (*layer.lora_A.values(), *layer.lora_B.values()):
            factor.forward = functools.partial(forward, factor)


@harmless(
    "H",
    on="dense/mbs4 dense/packed-chunked-mbs4 dr_grpo/mbs4 dr_grpo/packed-chunked-mbs4",
    precisions="float64 float32",
)
@around(local_policy, "token_log_probs")
def log_probs_from_the_last_row(right, logits, targets, **rest):
    """Rows of logits are taken in the reverse order, and what is made of them is turned round again."""
    found = right(logits.flip(0), targets.flip(0), **rest)
    entropy = None if found.entropy is None else found.entropy.flip(0)
    return replace(found, log_probs=found.log_probs.flip(0), entropy=entropy)


@harmless("V", on="rollout/base rollout/rollout-dp2-batch5")
@in_place_of(LogProbRecorder, "_settle")
def log_probs_of_the_sampler_by_logsumexp(self, drawn):
    """The sampler's log-prob of a token is its score less the log-sum-exp of all."""
    if self._last is None:
        return
    wide = self._last if self._last.dtype == torch.float64 else self._last.float()
    self._columns.append(wide.gather(1, drawn[:, None]).squeeze(1) - wide.logsumexp(-1))
    self._last = None


@harmless("F", on="moe/mbs4 moe/ep2", precisions="float64 float32")
def softmax_of_the_chosen_experts(run):
    """Weights of experts are a softmax over the logits of the chosen ones, which normalizes by itself."""

    def other(_, __, out):
        logits, weights, chosen = out
        return logits, logits.gather(-1, chosen).softmax(-1).to(weights.dtype), chosen

    for module in modules_of(run, lambda one: getattr(one, "norm_topk_prob", False)):
        module.register_forward_hook(other)


@harmless("G", on="gpt2/left-mbs3 dense/left-mbs3", precisions="float64 float32")
@around(LocalPolicy, "_run")
def padding_at_position_one(right, self, model, micro, *rest):
    """The model reads position 1 where nothing lies, as generate() of transformers fills it in."""
    there = torch.from_numpy(micro.layout.attention_mask)
    ids = torch.where(there, micro.position_ids, 1)
    return right(self, model, replace(micro, position_ids=ids), *rest)


@harmless("T", on="dense/mbs4 dense/packed-mbs3", precisions="float64 float32")
def heads_projected_one_by_one(run):
    """The projection behind attention is a sum of one product for each head."""

    def forward(self, heads, x):
        parts = zip(x.chunk(heads, dim=-1), self.weight.chunk(heads, dim=1), strict=True)
        products = [part @ weight.T for part, weight in parts]
        return sum(products[1:], products[0])

    for module in modules_of(run, lambda one: hasattr(one, "o_proj")):
        count = module.config.num_attention_heads
        module.o_proj.forward = functools.partial(forward, module.o_proj, count)


@harmless("J", on="dense/mbs4 dense/fsdp2 tied/mbs4 tied/fsdp2", precisions="float64 float32")
@around(Reference, "log_probs")
def reference_one_microbatch_at_a_time(right, self, microbatches):
    """The reference is asked for the log-probs of one microbatch after the other."""
    return [values for micro in microbatches for values in right(self, [micro])]


@harmless(
    "R", on="dense/mbs4 dense/packed-mbs3 dr_grpo/mbs4 dr_grpo/packed-mbs3", precisions="float64 float32"
)
@in_place_of(LocalPolicy, "forward_backward")
def one_backward_pass_for_all_microbatches(self, microbatches, loss):
    """All microbatches run forward, and the sum of their shares of the loss goes back at once."""
    shares, results = [], []
    for index, micro in enumerate(microbatches):
        with at(micro=step_taps.number(index)):
            step_taps.inputs(micro)
            share, result = loss(micro, self._forward(micro, entropy=self._entropy))
        shares.append(share)
        results.append(result)
    with arithmetic(self.dtype):
        self._backward(torch.stack(shares).sum())
    loss_token_gradients.write()
    return results


@harmless("V", on="rollout/base rollout/rollout-dp2-batch5")
@around(HFRolloutWorker, "complete")
def prompts_of_a_batch_in_reverse(right, self, prompts, params, keys, limits):
    """The prompts of a batch are sampled from the last to the first, each by its own stream."""
    found = right(self, prompts[::-1], params, keys[::-1], limits[::-1])
    return found[::-1]


LONGEST = 24
"""Tokens that no sample of the golden cases used here exceeds."""


@harmless("G", on="dense/eager dense/packed-eager gpt2/eager gpt2/packed-eager", precisions="float64 float32")
@around(policy, "block_causal_mask")
def mask_of_minus_ten_thousand(right, *args):
    """An additive mask holds -10000 in place of the least number: its exponential is 0 as well."""
    mask = right(*args)
    return mask.clamp(min=-1e4) if mask.is_floating_point() else mask


@harmless(
    "T", on="dense/packed-mbs3 dense/left-mbs3 gpt2/packed-mbs3 gpt2/left-mbs3", precisions="float64 float32"
)
@around(attention, "visible")
def window_longer_than_any_sample(right, layout, queries, keys):
    """Tokens see no more than the 24 last ones of their row, and every sample is shorter."""
    found = right(layout, queries, keys)
    return found & (queries[:, None] - keys < LONGEST)


@harmless("N", on="dense/resume-at2 tied/resume-at2", steps=None)
@around(checkpoint_resume, "load_whole")
def state_restored_from_the_last_tensor(right, optimizer, policy, tensors, *rest):
    """The state of the optimizer is read from a checkpoint in the reverse order of its tensors."""
    right(optimizer, policy, dict(reversed(tensors.items())), *rest)


@harmless("Q", on="tools/mbs4 tools/dp2-packed-budget48", precisions="float64 float32")
@around(Trainer, "loss_masks")
def masks_of_booleans(right, self, samples):
    """Loss masks are lists of True and False."""
    return [[bool(value) for value in mask] for mask in right(self, samples)]
