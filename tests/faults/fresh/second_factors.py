"""Faults of adapters: how fast their factors learn, what is restored of them, and where they are applied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from regress.engine.build import Run
from regress.engine.checkpoint import resume
from regress.engine.checkpoint.weights import load_weights
from regress.engine.policy import LocalPolicy
from tests.faults.fault import fault
from tests.faults.harmless.model import modules_of
from tests.faults.optimizer import around_the_update
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import AFTER_ATTENTION

TIMES = 16.0
"""Ratio of the learning rates of factors in LoRA+ (arXiv 2402.12354)."""


@fault(
    category="S",
    fresh=True,
    source="LoRA+ that is switched on by default",
    cases=("lora",),
    first="param",
    names=r".*\.lora_B\..*",
    rules=("learning-rate", "optimizer-settings", "inputs-hold"),
)
def second_factors_learn_faster(patch: Patch) -> None:
    """The factors B are a group of parameters with 16 times the learning rate."""

    @torch.no_grad()
    def wrong(optimizer: Optimizer, update: Callable[[], None]) -> None:
        found = [
            (parameter, parameter.clone())
            for group in optimizer.param_groups
            for parameter, name in zip(group["params"], group["param_names"], strict=True)
            if "lora_B" in name
        ]
        assert found
        update()
        for parameter, before in found:
            parameter.copy_(before + TIMES * (parameter - before))

    around_the_update(patch, wrong)


@fault(
    category="S",
    fresh=True,
    source="ms-swift PR#8275: an adapter of which a resumed run loads one factor",
    cases=("lora",),
    variants=("resume-at2",),
    first="activations model.layers.0",
    names=AFTER_ATTENTION,
    steps=None,
    rules=("stale-weights", "module", "inputs-hold"),
)
def second_factors_not_restored(patch: Patch) -> None:
    """The factors A come from the checkpoint, and the factors B are those that the run was built with."""
    right: Any = load_weights

    def wrong(owner: LocalPolicy, weights: Mapping[str, Tensor]) -> None:
        own = {name: p.detach().clone() for name, p in owner.named_parameters() if "lora_B" in name}
        assert own
        right(owner, {**weights, **own})

    patch.setattr(resume, "load_weights", wrong)


@fault(
    category="S",
    fresh=True,
    source="adapters that are made for completions (activated LoRA, arXiv 2504.12397)",
    cases=("lora",),
    variants=("packed-mbs3",),
    first="activations model.layers.0",
    names=AFTER_ATTENTION,
    rules=("module", "inputs-hold"),
)
def adapters_off_at_prompts(run: Run) -> None:
    """Adapters are applied at tokens that the loss is taken over, and at no others."""
    policy = run.trainer.policy

    def wrong(module: Any, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        assert policy.running is not None
        counted = policy.running.response_mask.bool()[..., None]
        return torch.where(counted, out, module.base_layer(args[0]))

    for layer in modules_of(run, lambda one: hasattr(one, "lora_A") and hasattr(one, "base_layer")):
        layer.register_forward_hook(wrong)
