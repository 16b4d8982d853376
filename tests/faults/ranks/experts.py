"""Faults of expert parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from regress.engine.build import Run
from regress.parallel import (
    expert,
)
from tests.faults.fault import fault
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import (
    AFTER_ATTENTION,
    EXPERTS,
    on_rank,
    sums_of,
)


def weighted(patch: Patch, change: Callable[[Tensor], Tensor]) -> None:
    """Change the weights by which the rows of experts are added."""
    right: Any = expert._added
    patch.setattr(
        expert,
        "_added",
        lambda rows, place, index, weights, dtype: right(rows, place, index, change(weights), dtype),
    )


@fault(
    category="F",
    source="SpecForge#226, of parameters",
    cases=("moe",),
    variants=("ep2",),
    first="invariants",
    rules=("split-left-out",),
    names="parts",
)
def experts_left_whole(patch: Patch) -> None:
    """Every rank keeps all experts, and its tokens: all values are right."""
    patch.setattr(expert, "apply", lambda *_: expert.ExpertPlan({}))


@fault(
    category="F",
    source="xtuner PR#2053",
    cases=("moe",),
    variants=("ep2",),
    first="activations",
    ranks=(0, 1),
    rules=("expert-exchange",),
    names=AFTER_ATTENTION,
)
def rows_to_the_wrong_expert(patch: Patch) -> None:
    """Each rank counts its experts from the other end."""
    right: Any = expert._run
    patch.setattr(
        expert, "_run", lambda module, rows, experts: right(module, rows, module.num_experts - 1 - experts)
    )


@fault(
    category="F",
    source="vllm-gaudi PR#1796",
    cases=("moe",),
    variants=("ep2",),
    first="activations",
    ranks=(0, 1),
    rules=("expert-exchange",),
    names=AFTER_ATTENTION,
)
def rows_of_later_experts_dropped(patch: Patch) -> None:
    """Ids count all experts, and a rank other than the first finds none of them in its own list."""
    right: Any = expert._run
    patch.setattr(expert, "_run", lambda *args: right(*args) * float(on_rank(0)))


@fault(
    category="F",
    source="PaddleFormers PR#3452",
    cases=("moe",),
    variants=("ep2",),
    first="activations",
    ranks=(0, 1),
    rules=("expert-exchange",),
    names=AFTER_ATTENTION,
)
def combined_without_weights(patch: Patch) -> None:
    weighted(patch, torch.ones_like)


@fault(
    category="F",
    source="PaddleFormers PR#3452: before and after the way",
    cases=("moe",),
    variants=("ep2",),
    first="activations",
    ranks=(0, 1),
    rules=("expert-exchange",),
    names=AFTER_ATTENTION,
)
def weighted_twice(patch: Patch) -> None:
    """By the sender, and by the combine."""
    weighted(patch, torch.square)


@fault(
    category="F",
    source="transformers#48687",
    cases=("moe",),
    variants=("ep2",),
    first="gradient",
    ranks=(0, 1),
    rules=("router-gradient",),
    names=r"model\.(embed_tokens|layers\.0)\..*|model\.layers\.1\.(?!mlp\.experts).*",
    blind=("loss 5 %", "loss 1 %", "allclose", "mean 1e-3"),
)
def router_without_gradient(patch: Patch) -> None:
    """The loss is right, and the router learns nothing from it."""
    weighted(patch, torch.detach)


@fault(
    category="F",
    source="Megatron#1628",
    cases=("moe",),
    variants=("ep2",),
    first="gradient",
    ranks=(0, 1),
    rules=("experts-reduced",),
    names=EXPERTS,
    blind=("loss 5 %", "loss 1 %", "allclose", "mean 1e-3"),
)
def experts_summed_over_their_owners(run: Run) -> None:
    """Different experts of several ranks are added as if they were replicas."""
    model: Any = run.trainer.policy
    found = sums_of(run)
    (group,) = {id(group): group for _, group in found}.values()
    found.append((sorted(model._experts), group))


@fault(
    category="F",
    source="pytorch#160285, DeepSpeed PR#5259",
    cases=("moe",),
    variants=("ep2",),
    first="gradient",
    ranks=(0, 1),
    rules=("experts-reduced",),
    names=EXPERTS,
    blind=("loss 5 %", "loss 1 %", "allclose", "mean 1e-3"),
)
def experts_times_ranks(run: Run) -> None:
    """An expert has met the tokens of all ranks, and its gradient is multiplied for them once more."""
    model: Any = run.trainer.policy
    right: Any = model.forward_backward

    def wrong(*args: Any) -> Any:
        results = right(*args)
        for name, parameter in model.named_parameters():
            if name in model._experts:
                parameter.grad *= dist.get_world_size()
        return results

    model.forward_backward = wrong


# @@new
