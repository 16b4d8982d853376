"""Faults of routers, and of what becomes of the rows that they send."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from regress.engine.build import Run
from regress.errors import ReplayError
from regress.parallel import expert
from tests.faults.fault import fault
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import AFTER_ATTENTION
from tests.faults.rounding import rounded

EXPERTS = 4
"""Experts of a layer of the case ``moe``."""


def routers_of(run: Run) -> Iterator[Any]:
    """Yield the routers of the policy; there have to be some."""
    found = [module for module in run.trainer.policy.model.modules() if hasattr(module, "norm_topk_prob")]
    if not found:
        raise ReplayError("there is no router")
    yield from found


@fault(
    category="F",
    fresh=True,
    source="DeepSpeed-MoE: a capacity factor of 1",
    cases=("moe",),
    variants=("dp2-ep2",),
    first="activations model.layers.0",
    names=AFTER_ATTENTION,
    rules=("expert-exchange", "module"),  # the first one names rows that are dropped
)
def rows_beyond_the_capacity_dropped(patch: Patch) -> None:
    """An expert takes no more rows of a rank than its even share; later ones count as nothing."""
    right: Any = expert._travelling

    def wrong(group: Any, ranks: int) -> Any:
        forward = right(group, ranks)

        def dropping(self: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            chosen = one_hot(index.flatten(), EXPERTS)
            place = (chosen.cumsum(0) * chosen).sum(-1).view_as(index)
            capacity = -(-index.numel() // EXPERTS)
            return forward(self, hidden, index, weights * (place <= capacity))

        return dropping

    patch.setattr(expert, "_travelling", wrong)


@fault(
    category="F",
    fresh=True,
    source="DeepSeek-V3: scores by a sigmoid, of a model that was trained with a softmax",
    cases=("moe",),
    first="activations model.layers.0",
    names=AFTER_ATTENTION,
    rules=("router", "module"),
)
def router_scores_by_sigmoid(run: Run) -> None:
    """The right experts are chosen, and weighted by normalized sigmoids of their logits."""

    def wrong(_: Any, __: Any, out: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, chosen = out
        scores = torch.sigmoid(logits).gather(-1, chosen)
        return logits, (scores / scores.sum(-1, keepdim=True)).to(weights.dtype), chosen

    for router in routers_of(run):
        router.register_forward_hook(wrong)


@fault(
    category="F",
    kind="precision",
    fresh=True,
    source="routers under autocast: logits in half precision",
    cases=("moe",),
    variants=("packed-mbs3",),
    first="activations model.layers.0",
    names=AFTER_ATTENTION,
    rules=("router", "module", "precision"),
)
def router_logits_in_bfloat16(run: Run) -> None:
    """Routers choose and weigh experts by logits that were rounded to half precision."""

    def wrong(router: Any, _: Any, out: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, _ = out
        narrow = rounded(logits)
        scores, chosen = narrow.softmax(-1).topk(router.top_k, dim=-1)
        return narrow, (scores / scores.sum(-1, keepdim=True)).to(weights.dtype), chosen

    for router in routers_of(run):
        router.register_forward_hook(wrong)
