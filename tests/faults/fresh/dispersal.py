"""Faults of the weights of experts: whom they are shared with, and which of them teach the router."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, stack

from regress.engine.build import Run
from regress.parallel import expert
from regress.parallel.exchange import Group
from tests.faults.fault import fault
from tests.faults.harmless.model import modules_of
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import AFTER_ATTENTION


@fault(
    category="F",
    fresh=True,
    source="an expert-parallel combine that normalizes the weights that it has received",
    cases=("moe",),
    variants=("ep2",),
    first="activations model.layers.0",
    names=AFTER_ATTENTION,
    ranks=(0, 1),
    rules=("expert-exchange", "router", "module", "inputs-hold"),
)
def weights_normalized_on_each_owner(patch: Patch) -> None:
    """Weights of the chosen experts are divided by the sum of those that one rank owns, not by the sum of all."""
    right: Any = expert._travelling

    def wrong(group: Group, ranks: int) -> Callable[[Any, Tensor, Tensor, Tensor], Tensor]:
        forward = right(group, ranks)

        def changed(self: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            owner = index // self.num_experts
            same = (owner[:, :, None] == owner[:, None, :]).to(weights.dtype)
            found: Tensor = forward(self, hidden, index, weights / (same * weights[:, None, :]).sum(-1))
            return found

        return changed

    patch.setattr(expert, "_travelling", wrong)


@fault(
    category="F",
    fresh=True,
    source="a combine that adds the first expert's rows in place, and all others behind no_grad",
    cases=("moe",),
    variants=("packed-pad16",),
    first="gradient",
    names=r"model\.(embed_tokens|layers\.0)\..*|model\.layers\.1\.(?!mlp\.experts).*",
    rules=(
        "router-gradient",
        "backward-of-a-module",
        "gradients",
        "inputs-hold",
    ),  # the second names a detach
)
def weight_of_the_second_expert_detached(run: Run) -> None:
    """The router learns from the weight of a token's first expert, and that of its second one has no gradient."""

    def wrong(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, index, weights = args
        first, *others = weights.unbind(1)
        return hidden, index, stack([first, *(other.detach() for other in others)], 1)

    for module in modules_of(run, lambda one: hasattr(one, "has_gate") and hasattr(one, "num_experts")):
        module.register_forward_pre_hook(wrong)
