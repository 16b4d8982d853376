"""Refactorings of what ranks gather and add, of the rows of experts, and of how completions are batched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from regress.engine.adapters.parameters import trained_parameters
from regress.engine.local import local
from regress.engine.passes import Part, Share, _Losses
from regress.engine.rollout import HFRolloutWorker
from regress.engine.sampling import Completion, SamplingParams
from regress.parallel import expert, policy, sequence
from regress.parallel.policy import ParallelPolicy
from tests.faults.fault import fault
from tests.faults.patch import Patch

WIDE = ("float64", "float32")


@fault(category="B", kind="harmless", fresh=True, variants=("dp2", "dp2-tp2"), precisions=WIDE)
def gradients_scattered_and_gathered(patch: Patch) -> None:
    """Gradients of a group are summed in pieces, one on each rank, and the pieces are gathered."""

    def other(
        parameters: Mapping[str, nn.Parameter], groups: Iterable[tuple[Sequence[str], ProcessGroup]]
    ) -> None:
        for names, group in groups:
            for name in names:
                parameter = parameters[name]
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                own, ranks = local(parameter.grad), group.size()
                flat = torch.zeros(-(-own.numel() // ranks) * ranks, dtype=own.dtype)
                flat[: own.numel()] = own.reshape(-1)
                piece = flat.new_empty(len(flat) // ranks)
                dist.reduce_scatter_tensor(piece, flat, group=group)
                dist.all_gather_into_tensor(flat, piece, group=group)
                own.copy_(flat[: own.numel()].view_as(own))

    patch.setattr(policy, "sum_gradients", other)


@fault(
    category="C",
    kind="harmless",
    fresh=True,
    variants=("tp2-sp", "tp2-sp-packed-budget64"),
    precisions=WIDE,
)
def columns_gathered_into_one_tensor(patch: Patch) -> None:
    """Columns of all ranks are gathered as rows of one tensor, which is turned back."""

    def other(part: Tensor, group: ProcessGroup) -> Tensor:
        own = part.transpose(0, 1).contiguous()
        whole = own.new_empty(len(own) * group.size(), *own.shape[1:])
        dist.all_gather_into_tensor(whole, own, group=group)
        return whole.transpose(0, 1).contiguous()

    patch.setattr(sequence, "_all_columns", other)


@fault(
    category="F",
    kind="harmless",
    fresh=True,
    cases=("moe",),
    variants=("ep2", "ep4-packed"),
    precisions=WIDE,
)
def rows_of_experts_added_by_einsum(patch: Patch) -> None:
    """The weighted sum of the rows of a token is an Einstein sum in the router's order."""

    def other(returned: Tensor, place: Tensor, index: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        rows = returned[place]
        return torch.einsum("twh,tw->th", rows, weights.to(rows.dtype)).to(dtype)

    patch.setattr(expert, "_added", other)


@fault(
    category="P",
    kind="harmless",
    fresh=True,
    cases=("rollout",),
    variants=("rollout-fsdp2-packed", "rollout-pp2"),
)
def weights_gathered_one_by_one(patch: Patch) -> None:
    """The sampler receives one parameter after the other, each in a collective of its own."""

    @torch.no_grad()
    def other(self: Any) -> None:
        own = {n: p for n, p in self.named_parameters() if n in self._owned}
        for name, whole in trained_parameters(self._whole):
            mine = (self.shard(name), local(own[name]).clone()) if name in own else None
            flat = whole.view(-1)
            for found in self._world.gather(mine):
                if found is None:
                    continue
                shard, values = found
                where = slice(None) if shard is None else torch.from_numpy(shard.indices())
                flat[where] = values.reshape(-1)

    patch.setattr(ParallelPolicy, "_refresh", other)


@fault(
    category="U",
    kind="harmless",
    fresh=True,
    cases=("dense", "dr_grpo"),
    variants=("mbs4", "dp2-packed-budget48"),
    precisions=WIDE,
)
def shares_added_from_the_last(patch: Patch) -> None:
    """Shares of the loss and metrics of microbatches are added from the last one to the first."""
    right: Any = _Losses.part

    def other(self: Any, shares: Sequence[Share]) -> Part:
        found: Part = right(self, shares[::-1])
        return found

    patch.setattr(_Losses, "part", other)


@fault(category="V", kind="harmless", fresh=True, cases=("rollout",), variants=("base", "rollout-tp2"))
def completions_sampled_one_by_one(patch: Patch) -> None:
    """Each prompt of a batch is completed in a batch of its own, without any padding."""
    right: Any = HFRolloutWorker.complete

    def other(
        self: HFRolloutWorker,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        keys: Sequence[tuple[object, ...]],
        limits: Sequence[int],
    ) -> list[Completion]:
        rows = zip(prompts, keys, limits, strict=True)
        return [one for prompt, key, limit in rows for one in right(self, [prompt], params, [key], [limit])]

    patch.setattr(HFRolloutWorker, "complete", other)
