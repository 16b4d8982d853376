"""megatron-core: the interleaved schedule on two stages crosses activations and gradients, without an error.

With two stages the next and the previous rank are one: of two messages that are sent at once, in a batch (the default,
`batch_p2p_comm`), each arrives as the other. Only `megatron.training` refuses it, which the wheel does not hold.
"""

import os
import tempfile
from datetime import timedelta
from pathlib import Path

os.environ["NVTE_FRAMEWORK"] = "none"
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 2


def rank_main(rank: int, folder: str) -> None:
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *args: None
    config = ModelParallelConfig(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, pipeline_dtype=torch.float32
    )
    link = P2PCommunicator(dist.group.WORLD, config)
    activation, gradient = torch.full((1,), 10.0 + rank), torch.full((1,), -10.0 - rank)
    received = link.send_forward_backward_recv_forward_backward(
        activation, gradient, recv_prev=True, recv_next=True, tensor_shape=(1,)
    )
    other = 1 - rank
    if rank == 0:
        print(f"activation from the stage before: right {10.0 + other}  actual {received[0].item()}")
        print(f"gradient from the stage behind: right {-10.0 - other}  actual {received[1].item()}")
        if received[0].item() != 10.0 + other:
            Path(folder, "reproduced").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    from importlib.metadata import version

    print(f"torch {torch.__version__}, megatron-core {version('megatron-core')}")
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (folder,), nprocs=RANKS, start_method="spawn")
        reproduced = Path(folder, "reproduced").exists()
    print("reproduced" if reproduced else "fixed in this version")
    raise SystemExit(not reproduced)
