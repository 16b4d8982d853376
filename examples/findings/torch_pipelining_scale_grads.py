"""torch pipelining: gradients are divided by the number of microbatches unless ``scale_grads=False``.

Right for a loss that is a mean over its microbatch, documented, and the default. A loss that is normalised by all
tokens of the step (GRPO, DAPO, any token mean over microbatches of unequal length) comes out M times too small.
"""

import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

RANKS, MICROBATCHES = 2, 4


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum() / 32  # all 32 elements of the step, not the 8 of the microbatch


def rank_main(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    inputs, layers = torch.rand(8, 4), [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
    loss_of(layers[1](layers[0](inputs)), inputs).backward()
    right, gradients = layers[rank].weight.grad, []
    for how in ({}, {"scale_grads": False}):
        layers[rank].zero_grad()
        stage = PipelineStage(layers[rank], rank, RANKS, torch.device("cpu"))
        arguments = {"target": inputs} if rank == 1 else {}
        ScheduleGPipe(stage, MICROBATCHES, loss_fn=loss_of, **how).step(*[inputs][rank:], **arguments)
        gradients.append(layers[rank].weight.grad)
    if rank == 0:
        for label, gradient in zip(("by default", "scale_grads=False"), gradients, strict=True):
            print(f"{label:18} right {right.norm():.6f}  actual {gradient.norm():.6f}", end="")
            print(f"  ratio {gradient.norm() / right.norm():.4f}")
        if torch.allclose(gradients[1], right) and not torch.allclose(gradients[0], right):
            Path(folder, "reproduced").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    print(f"torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (folder,), nprocs=RANKS, start_method="forkserver")
        reproduced = Path(folder, "reproduced").exists()
    print("reproduced" if reproduced else "fixed in this version")
    raise SystemExit(not reproduced)
