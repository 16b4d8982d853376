"""Faults of tensor and sequence parallelism."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.functional import linear

from regress.engine.build import Run
from regress.engine.local import local
from regress.parallel import (
    embedding,
    policy,
    sequence,
)
from regress.parallel.tensor import TensorPlan
from tests.faults.fault import fault
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import (
    AFTER_ATTENTION,
    EMBEDDED,
    without,
)


@fault(
    category="C",
    source="pytorch#108840",
    cases=("dense",),
    variants=("tp2",),
    first="invariants",
    rules=("split-left-out",),
    names="parts",
)
def weights_left_whole(patch: Patch) -> None:
    """No weight is split, and every rank computes everything: all values are right."""
    patch.setattr(policy, "_tensor_parallel", lambda *_: TensorPlan((), None, {}))


@fault(
    category="C",
    source="Megatron#1446",
    cases=("dense",),
    variants=("tp2-sp",),
    first="gradient",
    ranks=(0, 1),
    rules=("norms-not-summed",),
    names=r".*layernorm\.weight|model\.norm\.weight",
    blind=("loss 5 %", "loss 1 %", "allclose", "mean 1e-3"),
)
def norms_of_columns_not_summed(run: Run) -> None:
    """Norms that see a part of the tokens have a part of the gradient."""
    without(run, "layernorm", "model.norm")


@fault(
    category="C",
    source="Megatron#599, torchtitan#2387",
    cases=("moe",),
    variants=("tp2-sp-left",),
    first="gradient",
    ranks=(0, 1),
    rules=("router-gradient",),
    names=r".*\.gate\.weight",
    blind=("loss 5 %", "loss 1 %", "allclose", "mean 1e-3"),
)
def router_not_summed(run: Run) -> None:
    """So has a router."""
    without(run, "mlp.gate.")


@fault(
    category="C",
    source="torch 2.13 parallelize_module unties embeddings",
    cases=("tied",),
    variants=("tp2",),
    first="gradient",
    ranks=(0, 1),
    rules=("tied-embeddings",),
    names=rf"{EMBEDDED}|lm_head\.weight",
)
def untied(run: Run) -> None:
    """The output projection gets a parameter of its own."""
    head = run.trainer.policy.model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())


@fault(
    category="C",
    source="torchtitan PR#2388",
    cases=("dense",),
    variants=("tp2",),
    first="gradient",
    ranks=(0, 1),
    rules=("backward-of-a-module",),
    names=r"model\..*",
)
def gradient_taken_for_whole(patch: Patch) -> None:
    """A part of the gradient of hidden states enters the backward pass as if it were replicated."""

    def wrong(module: nn.Linear, mesh: Any, hidden: Tensor) -> Tensor:
        mine = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False).to_local()
        return linear(mine, local(module.weight))

    patch.setattr(embedding, "_project", wrong)


@fault(
    category="C",
    source="Megatron#7452 finding 7",
    cases=("dense",),
    variants=("tp2-sp",),
    first="activations",
    ranks=(0, 1),
    rules=("tensor-exchange",),
    names=AFTER_ATTENTION,
)
def columns_of_the_other_rank(patch: Patch) -> None:
    """Hidden states are scattered in the wrong order."""

    def wrong(whole: Tensor, group: ProcessGroup) -> Tensor:
        return whole.chunk(group.size(), dim=1)[group.size() - 1 - group.rank()].contiguous()

    patch.setattr(sequence, "_own_columns", wrong)


# @@new
