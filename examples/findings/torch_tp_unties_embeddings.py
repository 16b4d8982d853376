"""torch parallelize_module: tied embeddings come apart without a word.

Each module of the plan gets a new parameter. Two modules that shared one own two afterwards: each is trained on a part
of the gradient, and a checkpoint of a "tied" model keeps only one of them.
"""

import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

RANKS = 2


def tied_model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(32, 16), nn.Tanh(), nn.Linear(16, 32, bias=False))
    model[2].weight = model[0].weight
    return model


def gradient(model: nn.Sequential) -> torch.Tensor:
    tokens = torch.arange(32)
    nn.functional.cross_entropy(model(tokens), tokens.roll(1)).backward()
    return model[0].weight.grad


def rank_main(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    plan = {"0": embedding, "2": ColwiseParallel(output_layouts=Replicate())}
    model, whole = parallelize_module(tied_model(), init_device_mesh("cpu", (RANKS,)), plan), tied_model()
    right, wrong = gradient(whole), gradient(model).full_tensor()
    if rank == 0:
        print("parameters: right", len(list(whole.parameters())), " actual", len(list(model.parameters())))
        a, b = right.norm().item(), wrong.norm().item()
        print(f"norm of the gradient of the embedding: right {a:.5f}  actual {b:.5f}  ratio {b / a:.3f}")
        if model[0].weight is not model[2].weight and not torch.allclose(right, wrong, rtol=1e-3):
            Path(folder, "reproduced").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    print(f"torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (folder,), nprocs=RANKS, start_method="forkserver")
        reproduced = Path(folder, "reproduced").exists()
    print("reproduced" if reproduced else "fixed in this version")
    raise SystemExit(not reproduced)
