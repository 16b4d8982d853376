"""Trains on several gloo ranks under `record`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from regress.replay.replay_pool import shared_pool


def run_ranks(world: int, job: str, folder: Path) -> None:
    """Run a job of this file on so many ranks; each records into ``folder``."""
    shared_pool().run(on_rank, {"job": job, "folder": folder}, world)


def rows_of(rank: int, ranks: int) -> list[Tensor]:
    """Every ``ranks``-th sample."""
    from capture_loops import make_samples

    return make_samples()[rank::ranks]


def averaged_loss(ranks: int) -> Callable[[Tensor, dict[str, Tensor], int], Tensor]:
    """The loss of the whole batch, times the ranks over which the wrapper averages gradients."""
    from capture_loops import make_samples, token_losses

    total = sum(len(row) - 1 for row in make_samples())

    def loss(logits: Tensor, inputs: dict[str, Tensor], _: int) -> Tensor:
        losses, mask = token_losses(logits, inputs)
        return (losses * mask).sum() * ranks / total

    return loss


WAY: list[str | None] = [None]
"""Where `record` reads: its argument ``read_from``."""


def train(
    folder: Path, model: nn.Module, parallel: nn.Module, *, data: int, index: int, clip: float | None = 0.1
) -> None:
    from capture_loops import steps

    from regress import record

    rows, loss = rows_of(index, data), averaged_loss(data)
    with record(folder, model, token_gradient=True, read_from=WAY[0]):
        for _ in steps(parallel, samples=rows, accumulation=2, loss=loss, updates=2, clip=clip):
            pass


def ddp(folder: Path, rank: int, world: int) -> None:
    from capture_loops import tiny_model

    model = tiny_model()
    wrapped = nn.parallel.DistributedDataParallel(model)
    train(folder, wrapped, wrapped, data=world, index=rank)


def ddp_inner(folder: Path, rank: int, world: int) -> None:
    """As a trainer does that wraps the model itself."""
    from capture_loops import tiny_model

    model = tiny_model()
    train(folder, model, nn.parallel.DistributedDataParallel(model), data=world, index=rank)


def fsdp2(folder: Path, rank: int, world: int) -> None:
    from capture_loops import tiny_model
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    model = tiny_model()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    train(folder, model, model, data=world, index=rank)


def fsdp2_head(folder: Path, rank: int, world: int) -> None:
    """The head is a group of its own, whose weight lies here in parts while the decoder runs."""
    from capture_loops import tiny_model
    from torch.distributed.fsdp import fully_shard

    model = tiny_model()
    for module in (*model.model.layers, model.lm_head):
        fully_shard(module)
    fully_shard(model)
    train(folder, model, model, data=world, index=rank)


def fsdp2_fused(folder: Path, rank: int, world: int) -> None:
    """The head is fused with the loss: what the model returns for logits are log-probs."""
    from types import SimpleNamespace

    from capture_loops import FusedLogProbs, loss_mask, make_samples, steps, tiny_model
    from torch.distributed.fsdp import fully_shard
    from transformers import Qwen3ForCausalLM

    from regress import record

    class Fused(Qwen3ForCausalLM):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:  # type: ignore[override]  # it returns no logits
            hidden = self.model(input_ids, attention_mask).last_hidden_state[:, :-1]
            flat: Any = FusedLogProbs.apply(
                hidden.flatten(0, 1), self.lm_head.weight, input_ids[:, 1:].flatten(), 1.0
            )
            return SimpleNamespace(logits=flat.reshape(hidden.shape[:2]))

    model = tiny_model()
    model.__class__ = Fused
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    total = sum(len(row) - 1 for row in make_samples())

    def loss(log_probs: Tensor, inputs: dict[str, Tensor], _: int) -> Tensor:
        weights = (1 + inputs["input_ids"][:, 1:] % 3) * loss_mask(inputs)
        return -(log_probs * weights).sum() * world / total

    with record(folder, model, token_gradient=True):
        for _ in steps(model, samples=rows_of(rank, world), accumulation=2, loss=loss, updates=2):
            pass


def hsdp(folder: Path, rank: int, world: int) -> None:
    from capture_loops import tiny_model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    model = tiny_model()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(folder, model, model, data=world, index=rank)


def tp(folder: Path, rank: int, world: int) -> None:
    from capture_loops import tiny_model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    model = tiny_model()
    plan = {"lm_head": ColwiseParallel(output_layouts=Replicate())}
    for number in range(len(model.model.layers)):
        mlp = f"model.layers.{number}.mlp"
        plan |= {f"{mlp}.gate_proj": ColwiseParallel(), f"{mlp}.up_proj": ColwiseParallel()}
        plan |= {f"{mlp}.down_proj": RowwiseParallel()}  # type: ignore[dict-item]
    parallelize_module(model, mesh, plan)  # type: ignore[arg-type]
    train(folder, model, model, data=1, index=0, clip=None)  # torch cannot clip both kinds at once


def nothing_told(folder: Path, rank: int, world: int) -> None:
    """Ranks whose gradients nobody sums, as far as anybody can see."""
    import pytest
    from capture_loops import tiny_model

    from regress.errors import CaptureError

    model = tiny_model()
    with pytest.raises(CaptureError, match=r"nothing tells what the 2 ranks share .*record\(mesh=\{"):
        train(folder, model, model, data=world, index=rank)


class TokenWise(nn.Module):
    """A model whose states see their own token only, so that slices of a sequence need nothing of each other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(40, 16)
        self.body = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.out = nn.Linear(16, 40)

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        return self.out(self.body(self.embed(tokens)))  # type: ignore[no-any-return]


def train_slices(folder: Path, rank: int, ranks: int, group: object) -> None:
    """Train on columns of one packed row, the following token of each of which may lie on the next rank."""
    from capture_loops import make_samples, packed

    from regress import record

    inputs = packed(make_samples())
    total = inputs["input_ids"].shape[1]
    following = torch.cat([inputs["input_ids"][:, 1:], torch.zeros(1, 1, dtype=torch.long)], 1)
    live = torch.cat([inputs["position_ids"][:, 1:] > 0, torch.zeros(1, 1, dtype=torch.bool)], 1)
    width = -(-total // ranks)
    here = slice(rank * width, (rank + 1) * width)
    model = TokenWise()
    wrapped = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(folder, wrapped, decoder="body", head="out", token_gradient=True, sequence_group=group):
        for _ in range(2):
            logits = wrapped(inputs["input_ids"][:, here], inputs["position_ids"][:, here])
            losses = -logits.log_softmax(-1).gather(-1, following[:, here, None])[..., 0]
            ((losses * live[:, here]).sum() * ranks / 45).backward()
            optimizer.step()
            optimizer.zero_grad()


def sequence(folder: Path, rank: int, world: int) -> None:
    train_slices(folder, rank, world, distributed.group.WORLD)


JOBS = {
    job.__name__: job
    for job in (ddp, ddp_inner, fsdp2, fsdp2_head, fsdp2_fused, hsdp, tp, sequence, nothing_told)
}


def on_rank(job: str, folder: Path) -> None:
    job, _, way = job.partition(" from ")
    WAY[0] = way or None
    JOBS[job](folder, distributed.get_rank(), distributed.get_world_size())
    distributed.barrier()
