"""Faults of updates that leave something of what was before: rows of a weight, or a part of every value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from regress.engine.local import local
from tests.faults.fault import fault
from tests.faults.optimizer import EMBEDDING, around_the_update
from tests.faults.patch import Patch


def _embedding(optimizer: Optimizer) -> Any:
    """Return the weight of the token embeddings."""
    found = [
        parameter
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
        if name == EMBEDDING
    ]
    return found[0]


@fault(
    category="M",
    fresh=True,
    source="SparseAdam: rows of embeddings without a gradient are not updated",
    first=f"param {EMBEDDING}",
    names=r"model\.embed_tokens\.weight",
    rules=(
        "weight-decay",
        "no-update",
        "optimizer-settings",
        "undecided-update",
    ),  # these rows would only decay, and are as they were; the last one names a fault of the update
)
def rows_without_gradient_left_alone(patch: Patch) -> None:
    """Embeddings of tokens that the batch lacks keep their values and moments, and do not decay."""

    @torch.no_grad()
    def wrong(optimizer: Optimizer, update: Callable[[], None]) -> None:
        weight = _embedding(optimizer)
        still = weight.grad.abs().sum(1) == 0
        state = optimizer.state[weight]
        kept = [(values, values[still].clone()) for values in (weight, state["exp_avg"], state["exp_avg_sq"])]
        update()
        for values, before in kept:
            values[still] = before

    around_the_update(patch, wrong)


@fault(
    category="M",
    fresh=True,
    source="an average of weights that is trained on in place of them",
    cases=("tied",),
    variants=("fsdp2-tp2-sp",),
    first="param",
    rules=("learning-rate", "optimizer-settings"),  # the first names an average with those from before
)
def parameters_averaged_with_those_before(patch: Patch) -> None:
    """Behind each update a tenth of every parameter is what it was before."""

    @torch.no_grad()
    def wrong(optimizer: Optimizer, update: Callable[[], None]) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        before = [local(p.detach()).clone() for p in parameters]
        update()
        for parameter, known in zip(parameters, before, strict=True):
            local(parameter.detach()).lerp_(known, 0.1)

    around_the_update(patch, wrong)
