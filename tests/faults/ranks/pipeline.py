"""Faults of pipelines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from regress.engine.batch import Microbatch
from regress.engine.build import Run
from regress.parallel import (
    pipeline,
    schedules,
    stages,
)
from regress.parallel.pipeline import Pipeline
from tests.faults.fault import fault
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import (
    AFTER_ATTENTION,
    EMBEDDED,
    on_rank,
)


@fault(
    category="E",
    source="Megatron#844",
    cases=("tied",),
    variants=("pp2",),
    first="gradient",
    ranks=(0, 1),
    rules=("tied-embeddings",),
    names=EMBEDDED,
    blind=("loss 5 %", "loss 1 %", "allclose", "mean 1e-3"),
)
def tied_gradient_not_summed(patch: Patch) -> None:
    patch.setattr(Pipeline, "sum_tied", lambda self: None)


@fault(
    category="E",
    source="Megatron#844: in the hook and after it",
    cases=("tied",),
    variants=("pp2",),
    first="gradient",
    ranks=(0, 1),
    rules=("tied-embeddings", "gradient-power-of-two"),
    names=EMBEDDED,
)
def tied_gradient_summed_twice(patch: Patch) -> None:
    right: Any = Pipeline.sum_tied

    def wrong(self: Pipeline) -> None:
        right(self)
        right(self)

    patch.setattr(Pipeline, "sum_tied", wrong)


@fault(
    category="A",
    source="torchtitan#1733",
    cases=("tied",),
    variants=("pp2-mbs4",),
    first="gradient",
    ranks=(0, 1),
    rules=("gradient-divided-by-microbatches",),
)
def averaged_over_microbatches(patch: Patch) -> None:
    """``scale_grads=True``, as torch has it by default."""
    right: Any = schedules.runner

    def wrong(*args: Any) -> Any:
        made = right(*args)
        made.scale_grads = True
        return made

    patch.setattr(pipeline, "runner", wrong)


@fault(
    category="E",
    source="verl#2185, SkyRL PR#2096",
    cases=("tied",),
    variants=("pp2-mbs4",),
    first="activations",
    ranks=(1,),
    rules=("pipeline-exchange",),
    names=r"model\.layers\.1|model\.norm|lm_head",
)
def microbatches_swapped_at_the_end(patch: Patch) -> None:
    """The last stage takes the first two microbatches for each other."""
    right: Any = Pipeline.forward_backward

    def wrong(self: Pipeline, micros: Sequence[Microbatch], loss: Any, project: Any, visit: Any) -> Any:
        first, second, *rest = micros
        taken = {id(micro): other for micro, other in zip(micros, (second, first, *rest), strict=True)}
        return right(
            self,
            micros,
            lambda micro, out: loss(taken[id(micro)], out),
            lambda model, micro, hidden: project(model, taken[id(micro)], hidden),
            visit,
        )

    patch.setattr(Pipeline, "forward_backward", wrong)


@fault(
    category="E",
    source="transformers PR#24381",
    cases=("dense",),
    variants=("pp2",),
    first="activations",
    ranks=(1,),
    rules=("pipeline-exchange",),
    names=AFTER_ATTENTION,
)
def layer_on_two_stages(patch: Patch) -> None:
    """Stages begin one layer too early."""
    right: Any = stages.blocks_of_stage

    def wrong(blocks: int, stage: int, count: int) -> range:
        found = right(blocks, stage, count)
        return range(max(found.start - 1, 0), found.stop)

    patch.setattr(stages, "blocks_of_stage", wrong)


@fault(
    category="E",
    source="mlx-lm#1688, Megatron#1304",
    cases=("dense",),
    variants=("pp2",),
    first="coverage",
    ranks=(),
    rules=("part-not-held",),
    names=r"\w+/model\.layers\.1\b.*",
    status="missing",
    says="no rank holds model.layers.1",
)
def layer_on_no_stage(patch: Patch) -> None:
    """The last stage begins one layer too late."""
    right: Any = stages.blocks_of_stage

    def wrong(blocks: int, stage: int, count: int) -> range:
        found = right(blocks, stage, count)
        return range(found.start + (stage == count - 1), found.stop)

    patch.setattr(stages, "blocks_of_stage", wrong)


@fault(
    category="E",
    source="Fast-LLM#550, NeMo Automodel PR#3530",
    variants=("pp2-1f1b-packed-mbs3",),
    first="gradient",
    ranks=(0,),
    names=r"model\.(embed_tokens|layers\.0)\..*",
    rules=("accumulation",),
    blind=("loss 5 %", "loss 1 %", "allclose", "mean 1e-3"),
)
def last_microbatch_survives_on_a_stage(run: Run) -> None:
    """Gradients of the first stage are overwritten, not added to."""
    kept: dict[nn.Parameter, Tensor] = {}

    def keep(parameter: nn.Parameter) -> None:
        before = kept.get(parameter)
        grad = parameter.grad
        assert grad is not None
        own = grad.clone() if before is None else grad - before
        grad.copy_(own)
        kept[parameter] = own

    if on_rank(0):
        for _, parameter in run.trainer.policy.named_parameters():
            parameter.register_post_accumulate_grad_hook(keep)


# @@new
