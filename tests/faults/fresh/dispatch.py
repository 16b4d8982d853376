"""Faults of experts: what routers weigh them by, and the rows that travel to them and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from regress.engine.build import Run
from regress.parallel import expert
from regress.parallel.exchange import exchange
from tests.faults.fault import fault
from tests.faults.fresh.routers import routers_of
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import AFTER_ATTENTION
from tests.faults.rounding import rounded


@fault(
    category="F",
    fresh=True,
    source="DeepSeek-V3: a bias that balances experts, which must choose and not weigh",
    cases=("moe",),
    variants=("packed-pad16",),
    first="activations model.layers.0",
    names=AFTER_ATTENTION,
    rules=("router", "module"),
)
def bias_of_the_balance_weighs_experts(run: Run) -> None:
    """The chosen experts are weighted by their scores and the bias that balances their loads."""

    def wrong(router: Any, _: Any, out: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, chosen = out
        bias = torch.linspace(-0.05, 0.05, router.num_experts, dtype=logits.dtype)
        scores = (logits.softmax(-1) + bias).clamp(min=0.0).gather(-1, chosen)
        return logits, (scores / scores.sum(-1, keepdim=True)).to(weights.dtype), chosen

    for router in routers_of(run):
        router.register_forward_hook(wrong)


@fault(
    category="F",
    fresh=True,
    source="SkyRL PR#1908: rows and weights of choices in two orders",
    cases=("moe",),
    variants=("ep2-pp2-mbs3",),
    first="activations model.layers.0",
    names=AFTER_ATTENTION,
    rules=(
        "expert-exchange",  # names rows that are weighted other than the router says
        "router",
        "module",
    ),
)
def weights_in_the_order_of_choice(patch: Patch) -> None:
    """Rows of a token come in the order of their experts, and their weights in that of the router's choice."""

    def wrong(returned: Tensor, place: Tensor, index: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        ascending = index.argsort(dim=1)
        weighted = returned[place.gather(1, ascending)] * weights.unsqueeze(-1)
        return weighted.sum(1).to(dtype)

    patch.setattr(expert, "_added", wrong)


@fault(
    category="F",
    fresh=True,
    source="transformers#48687, torchtitan#2387: an all-to-all without autograd, joined with a rank's own rows",
    cases=("moe",),
    variants=("ep2-cp2-packed",),
    first="gradient",
    names=r"model\.(embed_tokens|layers\.0)\..*|model\.layers\.1\.(?!mlp\.gate).*",
    rules=("backward-of-a-module", "gradients"),  # the first names a collective without its gradient
)
def rows_of_other_ranks_without_gradient(patch: Patch) -> None:
    """Rows that travel between ranks have no gradient; those that stay on their rank have."""
    right: Any = exchange

    def wrong(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
        out: Tensor = right(rows, sent, received, group)
        own = dist.get_rank(group)
        before, here, behind = out.split([sum(received[:own]), received[own], sum(received[own + 1 :])])
        return torch.cat([before.detach(), here, behind.detach()])

    patch.setattr(expert, "exchange", wrong)


@fault(
    category="F",
    kind="precision",
    fresh=True,
    source="DeepEP: a dispatch of rows with fewer bits",
    cases=("moe",),
    variants=("ep4-packed",),
    first="activations model.layers.0",
    names=AFTER_ATTENTION,
    rules=("expert-exchange", "module", "precision"),
)
def rows_travel_in_bfloat16(patch: Patch) -> None:
    """Rows are rounded to half precision on their way to experts and back."""
    right: Any = exchange
    patch.setattr(expert, "exchange", lambda rows, *rest: right(rounded(rows), *rest))
