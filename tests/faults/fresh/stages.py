"""Faults of pipeline stages: what they hand back, what they are told, and what they keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from regress.engine.batch import Microbatch
from regress.parallel.policy import ParallelPolicy
from tests.faults.fault import fault
from tests.faults.optimizer import EMBEDDING, around_the_update
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import EMBEDDED, on_rank


class _Late(torch.autograd.Function):
    """Passes hidden states on, and hands back the gradient of those before them."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, kept: list[Tensor]) -> Tensor:
        ctx.kept = kept
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        before = ctx.kept[0] if ctx.kept else grad
        ctx.kept[:] = [grad]
        return before, None


@fault(
    category="E",
    fresh=True,
    source="a buffer of gradients to send that is filled behind the send",
    variants=("pp2-1f1b-packed-mbs3",),
    first="gradient",
    names=r"model\.embed_tokens\..*|model\.layers\.0\..*",
    ranks=(0,),
    rules=("gradient-of-a-stage", "backward-of-a-module", "gradients", "inputs-hold"),
)
def gradient_of_the_microbatch_before_handed_back(patch: Patch) -> None:
    """The last stage hands back the gradient of the hidden states of the microbatch before, from the second one on."""
    passes: Any = ParallelPolicy.forward_backward
    right: Any = ParallelPolicy._run
    kept: list[Tensor] = []

    def begun(self: ParallelPolicy, *args: Any) -> Any:
        kept.clear()
        return passes(self, *args)

    def wrong(self: ParallelPolicy, model: Any, micro: Microbatch, hidden: Tensor | None = None) -> Tensor:
        if hidden is not None and hidden.requires_grad:
            hidden = _Late.apply(hidden, kept)
        return right(self, model, micro, hidden)

    patch.setattr(ParallelPolicy, "forward_backward", begun)
    patch.setattr(ParallelPolicy, "_run", wrong)


@fault(
    category="E",
    fresh=True,
    source="Megatron#656: a copy of the embeddings on the last stage that nobody refreshes",
    cases=("tied",),
    variants=("pp2",),
    first=f"param {EMBEDDING}",
    names=EMBEDDED,
    ranks=(1,),
    # optimizer-settings: names what is done to parameters afterwards
    rules=("no-update", "state-of-a-rank", "optimizer-settings", "inputs-hold"),
)
def tied_weight_of_the_last_stage_left_behind(patch: Patch) -> None:
    """The last stage keeps the tied weight as it was before the update."""

    @torch.no_grad()
    def wrong(optimizer: Optimizer, update: Callable[[], None]) -> None:
        pairs = [
            (parameter, parameter.clone())
            for group in optimizer.param_groups
            for parameter, name in zip(group["params"], group["param_names"], strict=True)
            if name == EMBEDDING
        ]
        update()
        if on_rank(1):
            for parameter, before in pairs:
                parameter.copy_(before)

    around_the_update(patch, wrong)


@fault(
    category="E",
    fresh=True,
    source="position ids that the first stage alone is given",
    variants=("tp2-pp2-1f1b-packed-mbs3",),
    first="activations model.layers.1",
    names=r"model\.layers\.1|model\.norm|lm_head",
    ranks=(2, 3),
    # both exchanges name positions that a stage or rank makes itself
    rules=("pipeline-exchange", "tensor-exchange", "module", "rotary", "inputs-hold"),
)
def later_stages_without_positions(patch: Patch) -> None:
    """A later stage takes every token for the first one of its sample: its buffer of position ids holds zeros."""
    right: Any = ParallelPolicy._run

    def wrong(self: ParallelPolicy, model: Any, micro: Microbatch, hidden: Tensor | None = None) -> Tensor:
        if hidden is not None:
            micro = replace(micro, position_ids=torch.zeros_like(micro.position_ids))
        return right(self, model, micro, hidden)

    patch.setattr(ParallelPolicy, "_run", wrong)
