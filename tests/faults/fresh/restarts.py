"""Faults of what is restored from a checkpoint, and of activations that are computed again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from regress.engine.build import Run
from regress.engine.checkpoint import resume
from regress.engine.checkpoint.optimizer import load_whole
from regress.engine.checkpoint.weights import load_weights
from regress.engine.policy import LocalPolicy
from tests.faults.fault import fault
from tests.faults.harmless.model import modules_of
from tests.faults.optimizer import around_the_update
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import MOMENTS
from tests.faults.rounding import rounded


@fault(
    category="N",
    fresh=True,
    source="Megatron-Bridge PR#4082, NeMo-RL PR#2372: master weights that loading does not refresh",
    variants=("resume-at2",),
    first="param",
    steps=None,
    rules=("optimizer-settings", "inputs-hold"),  # the first one names the parameters that it begins with
)
def update_from_weights_of_before_the_checkpoint(patch: Patch) -> None:
    """The model has the weights of the checkpoint, and the first update starts from the initial ones."""
    right: Any = load_weights
    masters: dict[Tensor, Tensor] = {}

    def noted(owner: LocalPolicy, weights: Mapping[str, Tensor]) -> None:
        masters.update({parameter: parameter.detach().clone() for _, parameter in owner.named_parameters()})
        right(owner, weights)

    @torch.no_grad()
    def wrong(_: Optimizer, update: Callable[[], None]) -> None:
        for parameter, master in masters.items():
            parameter.copy_(master)
        masters.clear()
        update()

    patch.setattr(resume, "load_weights", noted)
    around_the_update(patch, wrong)


@fault(
    category="N",
    fresh=True,
    source="an optimizer whose state is matched by place, with parameters in another order than before",
    variants=("resume-at2",),
    first="optimizer",
    names=r".*\.[kv]_proj\.weight/exp_avg(_sq)?",
    steps=None,
    rules=("state-of-a-rank-unclipped", "inputs-hold"),  # the first one names states that are exchanged
)
def moments_of_keys_and_values_exchanged(patch: Patch) -> None:
    """The projections of keys and values, which have one shape, resume from each other's moments."""
    right: Any = load_whole

    def wrong(optimizer: Optimizer, policy: LocalPolicy, *rest: Any) -> None:
        right(optimizer, policy, *rest)
        named = dict(policy.named_parameters())
        for name, keys in named.items():
            if name.endswith("k_proj.weight"):
                values = named[name.replace("k_proj", "v_proj")]
                optimizer.state[keys], optimizer.state[values] = (
                    optimizer.state[values],
                    optimizer.state[keys],
                )

    patch.setattr(resume, "load_whole", wrong)


@fault(
    category="N",
    kind="precision",
    fresh=True,
    source="Megatron#1359: moments that a checkpoint holds in half precision",
    variants=("resume-at2",),
    precisions=("float64",),
    first="optimizer",
    names=MOMENTS,
    steps=None,
    rules=(
        "precision",
        "state-of-a-rank-unclipped",
        "inputs-hold",
    ),  # the second one names the state added to
)
def moments_restored_in_bfloat16(patch: Patch) -> None:
    """Moments come out of the checkpoint with the bits of half precision; what is added to them has all of its own."""
    right: Any = load_whole

    def wrong(optimizer: Optimizer, *rest: Any) -> None:
        right(optimizer, *rest)
        for state in optimizer.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key].copy_(rounded(state[key]))

    patch.setattr(resume, "load_whole", wrong)


@fault(
    category="N",
    kind="precision",
    fresh=True,
    source="pytorch#190758: activation checkpointing that recomputes under autocast",
    variants=("fsdp2-checkpointing-mbs4",),
    first="gradient",
    names=r"model\.(embed_tokens|layers)\..*",
    ranks=(0, 1),
    rules=("backward-of-a-module", "precision", "gradients", "inputs-hold"),
)
def norms_recomputed_in_bfloat16(run: Run) -> None:
    """Outputs of the norms of a layer have half precision when the backward pass computes them again."""

    def wrong(_: Any, __: Any, out: Tensor) -> Tensor | None:
        backwards = torch._C._current_graph_task_id() != -1
        return rounded(out) if backwards else None

    layers = modules_of(run, lambda one: hasattr(one, "post_attention_layernorm"))
    for layer in layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.register_forward_hook(wrong)
