"""Expert parallelism: every rank holds some experts of each layer, and tokens are exchanged with their owners.

A layer's router runs on the rank of the token. Each rank sends one row for every (token, chosen expert) to
the rank that owns the expert, which runs the model's own experts on the received rows; the rows return, and
are weighted and added on the token's rank. The gradient of an expert is complete on its owner, since rows of
all ranks of the mesh dimension pass through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from regress.errors import ConfigError
from regress.layout.shard_layout import ShardLayout
from regress.parallel.differentiable_collectives import Group, exchange, uncompiled
from regress.parallel.split_requirements import experts_refusal


@dataclass(frozen=True)
class ExpertPlan:
    """Part of each split parameter on this rank; every other parameter is whole on every rank."""

    experts: Mapping[str, ShardLayout]


def apply(model: PreTrainedModel, mesh: DeviceMesh) -> ExpertPlan:
    """Keep this rank's share of the experts, in place, under the same names.

    Args:
        model: with fused experts (parameters ``[E, ...]``).
        mesh: one-dimensional.

    Raises:
        ConfigError: if the model has no experts, or the ranks cannot share them equally.
    """
    ranks, rank = mesh.size(), mesh.get_local_rank()
    number = getattr(model.config, "num_experts", None)
    refusal = experts_refusal(type(model).__name__, number, ranks)
    if refusal is not None or number is None:
        raise ConfigError(refusal)
    mine = (rank * number // ranks, (rank + 1) * number // ranks)
    cut: dict[str, ShardLayout] = {}
    for name, module in _expert_modules(model, number):
        for leaf, parameter in module.named_parameters(recurse=False):
            cut[f"{name}.{leaf}"] = _part(parameter, mine)
            part = parameter.detach()[slice(*mine)].clone()
            setattr(module, leaf, nn.Parameter(part, requires_grad=parameter.requires_grad))
        module.num_experts = number // ranks
        module.forward = MethodType(_travelling(mesh.get_group(), ranks), module)
    return ExpertPlan(cut)


def _expert_modules(model: nn.Module, number: int) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of fused experts: those whose implementation transformers can choose (marked by
    ``has_gate``).
    """
    for name, module in list(model.named_modules()):
        if hasattr(module, "has_gate") and getattr(module, "num_experts", None) == number:
            yield name, module


def _part(parameter: Tensor, mine: tuple[int, int]) -> ShardLayout:
    whole = ShardLayout.whole(tuple(parameter.shape))
    return ShardLayout(whole.shape, ((mine,), *whole.ranges[1:]))


def _travelling(group: Group, ranks: int) -> Callable[[Any, Tensor, Tensor, Tensor], Tensor]:
    """Return the forward of a module whose experts are spread over the ranks; copies of the module bind to it too.

    It is excluded from compilation: the number of rows differs from call to call, and from rank to rank.
    """

    @uncompiled
    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        tokens, width = top_k_index.shape
        # in the order of the plain module: expert by expert, within one by place among the chosen,
        # then by token
        order = top_k_index.t().flatten().argsort(stable=True)
        counts = top_k_index.flatten().bincount(minlength=ranks * self.num_experts)
        sent = counts.view(ranks, -1).sum(1).tolist()
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group)
        received = arriving.view(ranks, -1).sum(1).tolist()
        rows = exchange(hidden_states[order % max(tokens, 1)], sent, received, group)
        experts = torch.arange(self.num_experts, device=rows.device).repeat(ranks).repeat_interleave(arriving)
        returned = exchange(_run(self, rows, experts), received, sent, group)
        place = order.argsort().view(width, tokens).t()  # [tokens, width]: where each choice's row came back
        if self.config._experts_implementation == "eager":
            return _added(returned, place, top_k_index, top_k_weights, hidden_states.dtype)
        return (returned[place] * top_k_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)

    return forward


def _run(module: nn.Module, rows: Tensor, experts: Tensor) -> Tensor:
    """Run the rows ``[R, H]`` through the local experts of these numbers, by the model's own implementation."""
    if len(rows):
        weights = rows.new_ones(len(rows), 1)
        out: Tensor = type(module).forward(module, rows, experts[:, None], weights)
        return out
    # No token chose an expert of this rank. Its parameters still get a gradient (zero, as in a plain
    # model), and the way back still has a graph, whose backward pass the other ranks wait for.
    return rows + sum(parameter.sum() for parameter in module.parameters()) * 0


def _added(returned: Tensor, place: Tensor, index: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weighted sum of the rows of each token ``[tokens, H]``, added as the eager experts do: in
    ascending order of the experts, each sum rounded to ``dtype``.

    The other implementations sum in the router's order at once.
    """
    ascending = index.argsort(dim=1)
    weighted = returned[place.gather(1, ascending)] * weights.gather(1, ascending).unsqueeze(-1)
    first, *others = weighted.to(dtype).unbind(1)
    return sum(others, first)
