"""Faults in low-rank adapters, each in a run that was built and has not started."""

import math

import torch
from torch import nn

from regress.errors import ReplayError
from regress.replay.probes.model_probes import adapter_in_the_reference, factors_in_bfloat16
from tests.faults.fault import fault, met_in


@fault(
    "S",
    "activations model.layers.0",
    "module",
    on="lora/mbs4",
    place="step0/rank0/micro0",
    tokens="all",
    probe="log_probs",
    silent={"dense": "there is no adapter"},
)
@met_in("peft: alpha / r")
def scaling_left_out(run):
    """The adapter's product is not multiplied by alpha / r."""
    for layer in _layers(run):
        layer.scaling = dict.fromkeys(layer.scaling, 1.0)


@fault(
    "S",
    "activations model.layers.0",
    "module",
    on="lora/mbs4",
    place="step0/rank0/micro0",
    tokens="all",
    probe="log_probs",
    silent={"dense": "there is no adapter"},
)
@met_in("peft: use_rslora")
def scaled_by_the_root_of_the_rank(run):
    """The product is multiplied by alpha / sqrt(r), the rule of rank-stabilized adapters."""
    for layer in _layers(run):
        layer.scaling = {name: value * math.sqrt(layer.r[name]) for name, value in layer.scaling.items()}


@fault(
    "S",
    "activations model.layers.0",
    "module",
    on="lora/mbs4",
    place="step0/rank0/micro0",
    tokens="all",
    probe="log_probs",
    silent={"dense": "there is no adapter"},
)
@met_in("TRL PR#3234, trlX#107")
def dropout_in_training(run):
    """Dropout before the adapters is active in the trainer's passes, and was not in the sampler's."""
    for layer in _layers(run):
        for name in list(layer.lora_dropout):
            layer.lora_dropout[name] = nn.Dropout(0.1)
        layer.train()


@fault(
    "S",
    "activations model.layers.0",
    "module",
    on="lora/mbs4",
    place="step0/rank0/micro0",
    tokens="all",
    probe="log_probs",
    silent={"dense": "there is no adapter"},
)
@met_in("verl#7495")
def adapter_switched_off(run):
    """The base model computes: no adapter takes part."""
    for layer in _layers(run):
        layer.scaling = dict.fromkeys(layer.scaling, 0.0)


@fault(
    "S",
    "activations model.layers.1",
    "module",
    on="lora/mbs4",
    place="step0/rank0/micro0",
    tokens="all",
    probe="log_probs",
    silent={"dense": "there is no adapter"},
)
@met_in("unsloth PR#8701")
def adapter_of_one_module_left_out(run):
    """One module of the last layer computes without its adapter, as a fused kernel that does not know of it."""
    layer = [*_layers(run)][-1]
    layer.scaling = dict.fromkeys(layer.scaling, 0.0)


@fault(
    "S",
    "activations model.layers.0",
    "module",
    on="lora/mbs4",
    place="step0/rank0/micro0",
    tokens="all",
    probe="log_probs",
    silent={"dense": "there is no adapter"},
)
@met_in("TRL#2698")
def merged_and_applied(run):
    """The adapter is merged into the weights and applied again."""
    for layer in _layers(run):
        delta = layer.get_delta_weight("default")
        layer.get_base_layer().weight.data += delta


@fault(
    "S",
    "activations model.layers.0",
    "module",
    on="lora/mbs4",
    place="step0/rank0/micro0",
    tokens="all",
    probe="log_probs",
    silent={"dense": "there is no adapter"},
)
@met_in("X-R1#49")
@torch.no_grad()
def factors_read_by_columns(run):
    """The factors A were stored as [in, r], and are read as if they were [r, in]."""
    for layer in _layers(run):
        for factor in layer.lora_A.values():
            factor.weight.copy_(factor.weight.T.contiguous().view(factor.weight.shape))


fault(
    "S",
    "activations model.layers.0",
    "module",
    kind="precision",
    on="lora/mbs4",
    place="step0/rank0/micro0",
    tokens="all",
    probe="log_probs",
    precisions="float64",
    silent={"dense": "there is no adapter"},
)(met_in("ms-swift PR#8275")(factors_in_bfloat16))

fault(
    "S",
    "ref_log_probs ref_log_probs",
    "reference-is-the-policy",
    on="lora/mbs4",
    place="step0/rank0/micro0",
    tokens="all",
    silent={"dense": "there is no adapter"},
)(met_in("TRL#3194, PR#6621")(adapter_in_the_reference))


@fault(
    "S",
    "gradient",
    "gradient-scale gradient-of-one-tensor",
    on="lora/mbs4",
    names=r".*\.lora_B\..*",
    place="step0/rank0",
    silent={"dense": "there is no adapter"},
)
@met_in("unsloth: scaling in the backward pass")
def gradients_of_factors_scaled_again(run):
    """The backward pass of a kernel multiplies the gradients of the factors B by alpha / r once more."""
    for layer in _layers(run):
        for name, factor in layer.lora_B.items():
            scale = layer.scaling[name]
            factor.weight.register_hook(lambda gradient, scale=scale: gradient * scale)


@fault(
    "S",
    "optimizer",
    "no-update",
    on="lora/mbs4",
    names=r".*\.lora_B\..*",
    place="step0/rank0",
    silent={"dense": "there is no adapter"},
)
@met_in("accelerate#2665")
def second_factor_frozen(run):
    """The optimizer does not know the factors B."""
    policy, optimizer = run.trainer.policy, run.trainer.optimizer
    frozen = {id(p) for name, p in policy.named_parameters() if ".lora_B." in name}
    for group in optimizer.param_groups:
        kept = [
            (p, n) for p, n in zip(group["params"], group["param_names"], strict=True) if id(p) not in frozen
        ]
        group["params"], group["param_names"] = [p for p, _ in kept], [name for _, name in kept]


@fault(
    "S",
    "gradient",
    "trained-in-one",
    on="lora/mbs4",
    names=r"(?!.*lora_).*",
    place="step0/rank0",
    status="extra",
    silent={"dense": "there is no adapter"},
)
@met_in("peft: requires_grad of base weights")
def base_model_trained(run):
    """The weights below the adapters are trained, too."""
    for layer in _layers(run):
        layer.get_base_layer().weight.requires_grad_()


def _layers(run):
    """Yield the layers with adapters."""
    found = [m for m in run.trainer.policy.model.modules() if hasattr(m, "lora_A") and hasattr(m, "scaling")]
    if not found:
        raise ReplayError("there is no adapter")
    yield from found
