"""A policy whose model and batches lie on several ranks."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from regress.engine.batch import Microbatch
from regress.engine.local import local
from regress.engine.policy import LocalPolicy, Loss, Result
from regress.layout import ShardLayout
from regress.parallel.reduction import sum_gradients
from regress.parallel.replicas import replicated
from regress.parallel.world import ProcessWorld

DATA = ("dp", "ep", "cp")
"""Dimensions over which parameters are replicated while the tokens differ, so that gradients have to be summed."""


class ParallelPolicy(LocalPolicy):
    """A model split over the ranks of a world; every rank builds one from the same whole model.

    Args:
        model: the whole model, the same on every rank; it is cut in place.
        world: the ranks.
        settings: those of `LocalPolicy`.
    """

    def __init__(self, model: PreTrainedModel, world: ProcessWorld, **settings: Any) -> None:
        self._world = world
        self._whole = copy.deepcopy(model)
        super().__init__(model, **settings)
        self._replicas = replicated(model, world) if self._trained else None
        if self._replicas is not None:
            self._callable = self._replicas.module
        self._summed = self._sums()
        self._owned = self._owners()
        self._versions: int | None = self._version()

    @property
    def _trained(self) -> bool:
        return any(parameter.requires_grad for parameter in self.model.parameters())

    @property
    def backward_scale(self) -> float:
        """What a share of the loss is multiplied by before the backward pass, because replicas are averaged."""
        return 1.0 if self._replicas is None else float(self._replicas.size)

    def forward_backward(self, microbatches: Sequence[Microbatch], loss: Loss[Result]) -> list[Result]:
        """The passes of this rank, then the sums of gradients over all ranks; see :class:`Policy`."""
        results = super().forward_backward(microbatches, loss)
        sum_gradients(dict(self.named_parameters()), self._summed)
        return results

    def shard(self, name: str) -> ShardLayout | None:
        """Which part of the parameter of that name lies here; ``None`` for all of it."""
        return None

    def part(self, name: str, whole: Tensor) -> Tensor:
        """The part of a tensor like the parameter of that name which lies here, placed like the parameter."""
        return whole

    def whole_model(self) -> PreTrainedModel:
        """A copy of the whole model with the parameters as they are now; all ranks ask for it at once."""
        version = self._version()
        if any(self._world.gather(version != self._versions)):
            self._refresh()
            self._versions = version
        return self._whole

    def _accumulating(self, *, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if self._replicas is None or last else self._replicas.no_sync()

    def _backward(self, share: Tensor) -> None:
        if self._replicas is None:
            share.backward()
        else:
            self._replicas.backward(share * self.backward_scale)

    def _total_norm(self, norms: Mapping[str, Tensor]) -> Tensor:
        """Every element of the gradient counts once: on the rank that owns it."""
        squares = [norm.double().square() for name, norm in norms.items() if name in self._owned]
        total = (
            torch.stack(squares).sum()
            if squares
            else torch.zeros((), dtype=torch.float64, device=self.device)
        )
        dist.all_reduce(total)
        return total.sqrt().to(self.log_prob_dtype)

    def _sums(self) -> list[tuple[list[str], Any]]:
        """Which gradients are summed over which ranks."""
        if self._replicas is not None or not self._trained:
            return []
        group = self._world.group(*DATA)
        names = [name for name, _ in self.named_parameters()]
        return [] if group is None else [(names, group)]

    def _owners(self) -> frozenset[str]:
        """The parameters whose part on this rank no lower rank has."""
        own = {name: self.shard(name) for name, _ in self.named_parameters()}
        earlier = self._world.gather(own)[: self._world.rank]
        return frozenset(
            name
            for name, part in own.items()
            if not any(name in other and other[name] == part for other in earlier)
        )

    def _version(self) -> int:
        """Grows with every change of the parameters."""
        return sum(parameter._version for parameter in self.model.parameters())

    @torch.no_grad()
    def _refresh(self) -> None:
        own = {
            name: (self.shard(name), local(parameter).cpu())
            for name, parameter in self.named_parameters()
            if name in self._owned
        }
        whole = dict(self._whole.named_parameters())
        for part in self._world.gather(own):
            for name, (shard, values) in part.items():
                target = whole[name].view(-1)
                values = values.reshape(-1).to(target.device)
                if shard is None:
                    target.copy_(values)
                else:
                    target[torch.from_numpy(shard.indices()).to(target.device)] = values
