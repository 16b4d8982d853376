"""accelerate: on CPU the FSDP plugin is dropped without a word, and the model is wrapped in DDP.

A test on CPU that means to hold a sharded model holds a whole one on every rank.
"""

import os
import tempfile
from datetime import timedelta
from pathlib import Path

import accelerate
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from accelerate import Accelerator, FullyShardedDataParallelPlugin

RANKS = 2


def rank_main(rank: int, folder: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), OMP_NUM_THREADS="1")
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT="0"
    )  # asked for, not used: there is a group already
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = accelerator.prepare(torch.nn.Linear(64, 64, bias=False))
    parameter = next(model.parameters())
    held = getattr(parameter, "to_local", lambda: parameter)().numel()
    if rank == 0:
        print(f"asked for FSDP 2, got {accelerator.distributed_type}, {type(model).__name__}")
        print(f"elements on a rank: right {64 * 64 // RANKS}  actual {held}  ratio {held * RANKS / 64 / 64}")
        if held != 64 * 64 // RANKS:
            Path(folder, "reproduced").touch()
    accelerator.end_training()


if __name__ == "__main__":
    print(f"torch {torch.__version__}, accelerate {accelerate.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (folder,), nprocs=RANKS, start_method="forkserver")
        reproduced = Path(folder, "reproduced").exists()
    print("reproduced" if reproduced else "fixed in this version")
    raise SystemExit(not reproduced)
