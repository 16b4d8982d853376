"""Faults in low-rank adapters, each in a run that was built and has not started."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from regress.engine.build import Run
from regress.errors import ReplayError
from tests.faults.fault import fault


@fault(
    category="S",
    source="peft: alpha / r",
    cases=("lora",),
    first="activations model.layers.0",
    place="step0/rank0/micro0",
    tokens="all",
    probe="log_probs",
    rules=("module",),
    calibration=True,
    silent={"dense": "there is no adapter"},
)
def scaling_left_out(run: Run) -> None:
    """The adapter's product is not multiplied by alpha / r."""
    for layer in _layers(run):
        layer.scaling = dict.fromkeys(layer.scaling, 1.0)


@fault(
    category="S",
    source="peft: use_rslora",
    cases=("lora",),
    first="activations model.layers.0",
    place="step0/rank0/micro0",
    tokens="all",
    probe="log_probs",
    rules=("module",),
    calibration=True,
    silent={"dense": "there is no adapter"},
)
def scaled_by_the_root_of_the_rank(run: Run) -> None:
    """The product is multiplied by alpha / sqrt(r), the rule of rank-stabilized adapters."""
    for layer in _layers(run):
        layer.scaling = {name: value * math.sqrt(layer.r[name]) for name, value in layer.scaling.items()}


@fault(
    category="S",
    source="TRL PR#3234, trlX#107",
    cases=("lora",),
    first="activations model.layers.0",
    place="step0/rank0/micro0",
    tokens="all",
    probe="log_probs",
    rules=("module",),
    calibration=True,
    silent={"dense": "there is no adapter"},
)
def dropout_in_training(run: Run) -> None:
    """Dropout before the adapters is active in the trainer's passes, and was not in the sampler's."""
    for layer in _layers(run):
        for name in list(layer.lora_dropout):
            layer.lora_dropout[name] = nn.Dropout(0.1)
        layer.train()


@fault(
    category="S",
    source="verl#7495",
    cases=("lora",),
    first="activations model.layers.0",
    place="step0/rank0/micro0",
    tokens="all",
    probe="log_probs",
    rules=("module",),
    calibration=True,
    silent={"dense": "there is no adapter"},
)
def adapter_switched_off(run: Run) -> None:
    """The base model computes: no adapter takes part."""
    for layer in _layers(run):
        layer.scaling = dict.fromkeys(layer.scaling, 0.0)


@fault(
    category="S",
    source="unsloth PR#8701",
    cases=("lora",),
    first="activations model.layers.1",
    place="step0/rank0/micro0",
    tokens="all",
    probe="log_probs",
    rules=("module",),
    calibration=True,
    silent={"dense": "there is no adapter"},
)
def adapter_of_one_module_left_out(run: Run) -> None:
    """One module of the last layer computes without its adapter, as a fused kernel that does not know of it."""
    layer = [*_layers(run)][-1]
    layer.scaling = dict.fromkeys(layer.scaling, 0.0)


@fault(
    category="S",
    source="TRL#2698",
    cases=("lora",),
    first="activations model.layers.0",
    place="step0/rank0/micro0",
    tokens="all",
    probe="log_probs",
    rules=("module",),
    calibration=True,
    silent={"dense": "there is no adapter"},
)
def merged_and_applied(run: Run) -> None:
    """The adapter is merged into the weights and applied again."""
    for layer in _layers(run):
        delta = layer.get_delta_weight("default")
        layer.get_base_layer().weight.data += delta


@fault(
    category="S",
    source="X-R1#49",
    cases=("lora",),
    first="activations model.layers.0",
    place="step0/rank0/micro0",
    tokens="all",
    probe="log_probs",
    rules=("module",),
    calibration=True,
    silent={"dense": "there is no adapter"},
)
@torch.no_grad()
def factors_read_by_columns(run: Run) -> None:
    """The factors A were stored as [in, r], and are read as if they were [r, in]."""
    for layer in _layers(run):
        for factor in layer.lora_A.values():
            factor.weight.copy_(factor.weight.T.contiguous().view(factor.weight.shape))


@fault(
    category="S",
    kind="precision",
    precisions=("float64",),
    source="ms-swift PR#8275",
    cases=("lora",),
    first="activations model.layers.0",
    place="step0/rank0/micro0",
    tokens="all",
    probe="log_probs",
    rules=("module",),
    calibration=True,
    silent={"dense": "there is no adapter"},
)
@torch.no_grad()
def factors_in_bfloat16(run: Run) -> None:
    """The factors are rounded to half precision on their way from the file."""
    for _, parameter in run.trainer.policy.named_parameters():
        parameter.copy_(parameter.bfloat16().to(parameter.dtype))


@fault(
    category="S",
    source="TRL#3194, PR#6621",
    cases=("lora",),
    first="ref_log_probs ref_log_probs",
    place="step0/rank0/micro0",
    tokens="all",
    rules=("reference-is-the-policy",),
    calibration=True,
    silent={"dense": "there is no adapter"},
)
def adapter_in_the_reference(run: Run) -> None:
    """The reference is computed with the policy's adapter on."""
    reference = run.trainer.reference
    if reference is None or reference._adapter is None:
        raise ReplayError("there is no reference without an adapter")
    for name, parameter in run.trainer.policy.named_parameters():
        reference._adapter[name] = parameter.detach().clone()


@fault(
    category="S",
    source="unsloth: scaling in the backward pass",
    cases=("lora",),
    first="gradient",
    names=r".*\.lora_B\..*",
    place="step0/rank0",
    rules=("gradient-scale", "gradient-of-one-tensor"),
    calibration=True,
    silent={"dense": "there is no adapter"},
)
def gradients_of_factors_scaled_again(run: Run) -> None:
    """The backward pass of a kernel multiplies the gradients of the factors B by alpha / r once more."""
    for layer in _layers(run):
        for name, factor in layer.lora_B.items():
            scale = layer.scaling[name]
            factor.weight.register_hook(lambda gradient, scale=scale: gradient * scale)


@fault(
    category="S",
    source="accelerate#2665",
    cases=("lora",),
    first="optimizer",
    names=r".*\.lora_B\..*",
    place="step0/rank0",
    rules=("no-update",),
    calibration=True,
    silent={"dense": "there is no adapter"},
)
def second_factor_frozen(run: Run) -> None:
    """The optimizer does not know the factors B."""
    policy, optimizer = run.trainer.policy, run.trainer.optimizer
    frozen = {id(p) for name, p in policy.named_parameters() if ".lora_B." in name}
    for group in optimizer.param_groups:
        kept = [
            (p, n) for p, n in zip(group["params"], group["param_names"], strict=True) if id(p) not in frozen
        ]
        group["params"], group["param_names"] = [p for p, _ in kept], [name for _, name in kept]


@fault(
    category="S",
    source="peft: requires_grad of base weights",
    cases=("lora",),
    first="gradient",
    names=r"(?!.*lora_).*",
    place="step0/rank0",
    status="extra",
    rules=("trained-in-one",),
    calibration=True,
    silent={"dense": "there is no adapter"},
)
def base_model_trained(run: Run) -> None:
    """The weights below the adapters are trained, too."""
    for layer in _layers(run):
        layer.get_base_layer().weight.requires_grad_()


def _layers(run: Run) -> Iterator[Any]:
    """Yield the layers with adapters."""
    found = [m for m in run.trainer.policy.model.modules() if hasattr(m, "lora_A") and hasattr(m, "scaling")]
    if not found:
        raise ReplayError("there is no adapter")
    yield from found


# @@new
