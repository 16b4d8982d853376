"""Faults in the backward pass from log-probs and entropies to logits."""

import torch

from regress.replay.fault_injection import by
from regress.replay.probes.model_probes import in_logits_gradient, normalization_without_gradient
from tests.faults.fault import fault, met_in

fault("R", "logit_gradient logit_gradient", "log-softmax-backward", place="step0/rank0/micro0")(
    met_in("a fused kernel that detaches log-sum-exp")(normalization_without_gradient)
)


@fault(
    "R",
    "logit_gradient logit_gradient",
    "log-softmax-backward",
    on="dr_grpo/mbs4",
    place="step0/rank0/micro0",
)
@met_in("NeMo-RL PR#935")
@by(in_logits_gradient)
def temperature_without_gradient(right, *args):
    """The gradient is not divided by the temperature."""
    found = right(*args)
    return torch.mul(found, args[5])


@fault(
    "R", "logit_gradient logit_gradient", "entropy-backward", on="dr_grpo/mbs4", place="step0/rank0/micro0"
)
@met_in("verl PR#1672")
@by(in_logits_gradient)
def entropy_without_gradient(right, logits, targets, stats, g, h, *rest):
    """The gradient of the entropy does not reach the logits."""
    return right(logits, targets, stats, g, None, *rest)


@fault("R", "logit_gradient logit_gradient", "logit-gradient", place="step0/rank0/micro0")
@met_in("Liger-Kernel: rows that fill no block")
@by(in_logits_gradient)
def last_rows_without_gradient(right, *args):
    """A kernel leaves out the last rows, which fill no block."""
    found = right(*args)
    found[-(len(found) % 8 or 1) :] = 0
    return found
