"""torch DTensor: on a mesh over new process groups, operations run on the groups of an older, equal mesh.

The cache of sharding decisions keeps meshes, and for its key two meshes over the same ranks are equal, whatever process
groups stand behind them. Where the old group was destroyed, the next job in the same process fails or waits for ever;
where it lives, both meshes share one communicator.
"""

import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

RANKS = 2


def rank_main(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=30))
    wrong = 0
    for job in range(2):
        group = dist.new_group(list(range(RANKS)))
        mesh = DeviceMesh.from_group(group, "cpu")
        total = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)]).sum()
        try:
            value = str(total.full_tensor().item())
        except Exception as error:  # torch raises what it likes
            value = str(error).splitlines()[0]
        wrong += value != "28.0"
        if rank == 0:
            print(f"job {job}, group {group.group_name}: right 28.0  actual {value}")
        dist.destroy_process_group(group)
    if wrong:
        Path(folder, "reproduced").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    print(f"torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (folder,), nprocs=RANKS, start_method="forkserver")
        reproduced = Path(folder, "reproduced").exists()
    print("reproduced" if reproduced else "fixed in this version")
    raise SystemExit(not reproduced)
