"""gloo: all_to_all_single into a non-contiguous output fills it in the wrong order, silently.

``torch.empty_like`` of a transposed tensor is such an output. The exchange writes the memory from its start, whatever
the strides say. NCCL refuses ("Tensors must be contiguous").
"""

import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 2


def rank_main(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    # what the heads exchange of a sequence-parallel attention does: heads first, then one all-to-all
    heads = (torch.arange(6.0) + 10 * rank).view(3, 2).t()
    outputs = {"contiguous": torch.empty(2, 3), "empty_like": torch.empty_like(heads)}
    for output in outputs.values():
        dist.all_to_all_single(output, heads.contiguous())
    right, wrong = outputs.values()
    if rank == 0:
        print("right ", right.tolist())
        print(
            "actual",
            wrong.tolist(),
            f"strides {wrong.stride()}, {int((right != wrong).sum())} of 6 elements wrong",
        )
        if not torch.equal(right, wrong):
            Path(folder, "reproduced").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    print(f"torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (folder,), nprocs=RANKS, start_method="forkserver")
        reproduced = Path(folder, "reproduced").exists()
    print("reproduced" if reproduced else "fixed in this version")
    raise SystemExit(not reproduced)
