"""Faults in the accumulation of gradients, and in their norm and clipping."""

import torch
from torch import nn

from regress.engine import grpo_trainer
from regress.engine.causal_lm_policy import LocalPolicy
from regress.replay.fault_injection import around, by, in_place_of
from regress.replay.probes.update_probes import (
    after_each_backward,
    gradients_in_bfloat16,
    last_microbatch_left_out,
    norm_of_clipping_off,
)
from tests.faults.fault import EVERY_CHECK, FORWARD_CHECKS, SCALE_BLIND_CHECKS, fault, met_in

fault(
    "G",
    "coverage batch_inputs",
    "batch-left-out",
    place="step0",
    status="coverage",
    says="was produced by no microbatch",
)(met_in("prime-rl PR#1035")(last_microbatch_left_out))


@fault(
    "B",
    "gradient lm_head.weight",
    "accumulation",
    place="step0/rank0",
    silent={"dense/base": "there is one microbatch"},
    blind=FORWARD_CHECKS,
)
@met_in("Fast-LLM#550, NeMo Automodel PR#3530")
@by(after_each_backward)
def only_the_last_survives(policy, last):
    """The gradient buffer is overwritten, not added to."""
    return None if last else policy.zero_grad()


@fault("L", "gradient lm_head.weight", "accumulation", place="step0/rank0", blind=FORWARD_CHECKS)
@met_in("clipping inside of the accumulation loop")
@by(after_each_backward)
def clipped_every_microbatch(policy, last):
    nn.utils.clip_grad_norm_(policy.model.parameters(), 0.05)


@fault(
    "A",
    "gradient lm_head.weight",
    "gradient-divided-by-microbatches",
    place="step0/rank0",
    blind=SCALE_BLIND_CHECKS,
)
@met_in("unsloth-zoo PR#1023, transformers PR#35438")
@by(after_each_backward)
def divided_twice(policy, last):
    """The weights hold the denominator, and accumulation over three microbatches divides once more."""
    for parameter in policy.model.parameters():
        parameter.grad /= 3 if last else 1


@fault("B", "gradient lm_head.weight", "gradient-of-one-tensor gradient-power-of-two", place="step0/rank0")
@met_in("Megatron#1446: a sum over two ranks taken for a mean")
@by(after_each_backward)
def one_gradient_halved(policy, last):
    """The sum over two ranks of one parameter's gradient is taken for a mean."""
    gradient = next(reversed([*policy.model.parameters()])).grad
    gradient /= 2 if last else 1


fault("O", "gradient lm_head.weight", "gradient-dtype", kind="precision")(
    met_in("DeepSpeed PR#7985")(gradients_in_bfloat16)
)


@fault(
    "L",
    "optimizer model.embed_tokens.weight/exp_avg",
    "clip-of-gradients-left-out",
    place="step2/rank0",
    steps=None,
    blind=EVERY_CHECK,
)
@met_in("AReaL PR#335: an iterator that was used up")
@around(LocalPolicy, "clip_grad_norm")
def clipping_left_out(right, self, _):
    return right(self, None)


fault(
    "L", "optimizer model.embed_tokens.weight/exp_avg", "clip-of-gradients", place="step2/rank0", steps=None
)(met_in("pytorch#149768")(norm_of_clipping_off))


@fault("N", "coverage", "batch-twice not-planned")
@met_in("verl PR#5725: a position in the data that is counted twice")
@around(grpo_trainer, "train_step")
def first_microbatch_twice(right, model, optimizer, tokens, micros, *args, **rest):
    """The first microbatch is trained on again at the end."""
    return right(model, optimizer, tokens, [*micros, micros[0]], *args, **rest)


@fault(
    "L",
    "optimizer",
    "clip-of-gradients clip-of-gradients-left-out state-of-a-rank-unclipped",
    blind=EVERY_CHECK,
)
@met_in("torch.nn.utils.clip_grad_value_")
@around(LocalPolicy, "clip_grad_norm")
def clipped_by_value(right, self, limit):
    """Every element is clamped at a thousandth, and the norm is left alone."""
    norm = right(self, None)
    for _, parameter in self.named_parameters():
        if parameter.grad is not None:
            parameter.grad.clamp_(-1e-3, 1e-3)
    return norm


@fault("L", "optimizer", "clip-of-gradients clip-of-gradients-left-out", steps=None)
@met_in("clipping inside a loop over parameters")
@around(LocalPolicy, "clip_grad_norm")
def clipped_parameter_by_parameter(right, self, limit):
    """Each gradient is clipped by its own norm."""
    norm = right(self, None)
    for _, parameter in self.named_parameters():
        if parameter.grad is not None and limit is not None:
            parameter.grad.mul_((limit / (parameter.grad.norm() + 1e-6)).clamp(max=1.0))
    return norm


@fault(
    "L",
    "grad_norm grad_norm",
    "norm",
    blind=("loss 5 %", "loss 1 %", "cosine 0.99", "L2 8.3 %", "allclose", "mean 1e-3"),
)
@met_in("norm_type=inf")
@in_place_of(LocalPolicy, "_total_norm")
def largest_norm(self, norms):
    """The largest of the norms of all gradients stands for their norm."""
    return torch.stack([*norms.values()]).max()


@fault("L", "grad_norm grad_norm", "norm")
@met_in("AReaL#312: squares that are not taken")
@in_place_of(LocalPolicy, "_total_norm")
def sum_of_norms(self, norms):
    """Norms of gradients are added, not their squares."""
    return torch.stack([*norms.values()]).sum()


@fault("B", "gradient", "gradient-of-the-last-update", place="step1/rank0", steps=2)
@met_in("optimizer.zero_grad that is not called")
@in_place_of(LocalPolicy, "zero_grad")
def gradients_of_the_last_update_kept(self):
    """Gradients of the update before are still there."""
    return


@fault("B", "gradient", "accumulation")
@met_in("NeMo Automodel PR#3530")
def first_microbatch_wiped(patch):
    """Gradients are dropped once more after the first microbatch."""
    passed = []

    def wipe(policy, last):
        passed.append(last)
        if len(passed) == 1:
            policy.zero_grad()
        if last:
            passed.clear()

    after_each_backward(patch, wipe)


@fault("A", "gradient", "accumulation")
@met_in("torchtitan#1733: an average that runs along")
@by(after_each_backward)
def running_average_of_microbatches(policy, last):
    """After each microbatch what was accumulated is divided by two."""
    for parameter in policy.model.parameters():
        if parameter.grad is not None and not last:
            parameter.grad /= 2
