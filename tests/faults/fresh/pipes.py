"""Faults of what stages and tensor-parallel ranks hand on: a scale, a dtype, and inputs of products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from regress.engine.batch import Microbatch
from regress.engine.build import Run
from regress.parallel import pipeline
from regress.parallel.policy import ParallelPolicy
from regress.parallel.relay import relay
from tests.faults.fault import fault
from tests.faults.harmless.model import modules_of
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import AFTER_ATTENTION, DividedGradient
from tests.faults.rounding import rounded


@fault(
    category="E",
    fresh=True,
    source="torchtitan#1733: scale_grads, where the loss of the last stage is scaled back",
    variants=("pp2-mbs4",),
    first="gradient",
    names=r"model\.(embed_tokens|layers\.0)\..*",
    ranks=(0,),
    rules=(
        "gradient-of-a-stage",  # names what it receives from the stage behind it
        "backward-of-a-module",
        "gradient-divided-by-microbatches",
        "gradient-scale",
        "gradients",
        "inputs-hold",
    ),
)
def mean_over_microbatches_handed_back(patch: Patch) -> None:
    """The last stage divides the gradients that it hands back by the number of microbatches, and keeps its own."""
    passes: Any = ParallelPolicy.forward_backward
    right: Any = ParallelPolicy._run
    counts = [1]

    def begun(self: ParallelPolicy, microbatches: Sequence[Microbatch], *rest: Any) -> Any:
        counts[0] = len(microbatches)
        return passes(self, microbatches, *rest)

    def wrong(self: ParallelPolicy, model: Any, micro: Microbatch, hidden: Tensor | None = None) -> Tensor:
        if hidden is not None and hidden.requires_grad:
            hidden = DividedGradient.apply(hidden, counts[0])
        found: Tensor = right(self, model, micro, hidden)
        return found

    patch.setattr(ParallelPolicy, "forward_backward", begun)
    patch.setattr(ParallelPolicy, "_run", wrong)


@fault(
    category="E",
    kind="precision",
    fresh=True,
    source="a dtype of stages that is set for inference, which scores the reference, too",
    variants=("pp2-1f1b-packed-mbs3",),
    first="ref_log_probs",
    rules=("reference", "precision", "inputs-hold"),  # the first one names the dtype
)
def hidden_states_of_scores_sent_in_bfloat16(patch: Patch) -> None:
    """In passes without a backward pass, which score the reference, stages send hidden states in half precision."""

    def wrong(
        ranks: Sequence[int],
        group: ProcessGroup,
        count: int,
        forward: Callable[[int, int, Tensor | None], Tensor | None],
        buffer: Callable[[int], Tensor],
    ) -> None:
        def narrowed(stage: int, micro: int, hidden: Tensor | None) -> Tensor | None:
            return forward(stage, micro, None if hidden is None else rounded(hidden))

        relay(ranks, group, count, narrowed, buffer)

    patch.setattr(pipeline, "relay", wrong)


@fault(
    category="T",
    kind="precision",
    fresh=True,
    source="a fused SwiGLU kernel that writes half precision",
    cases=("tied",),
    variants=("tp2-pp2-mbs4",),
    first="activations model.layers.0",
    names=AFTER_ATTENTION,
    rules=("tensor-exchange", "pipeline-exchange", "module", "precision", "inputs-hold"),
)
def gated_values_in_bfloat16(run: Run) -> None:
    """Round the gated values of an MLP to half precision before the product that follows."""

    def wrong(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (rounded(args[0]), *args[1:])

    for module in modules_of(run, lambda one: hasattr(one, "gate_proj") and hasattr(one, "down_proj")):
        module.down_proj.register_forward_pre_hook(wrong, prepend=True)
