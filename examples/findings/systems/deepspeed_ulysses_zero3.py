"""DeepSpeed: under Ulysses ZeRO 3 divides gradients by the parts of a sequence, too; stages 1 and 2 do not.

Two ranks hold half of the tokens of one sample each, so the gradient is the sum of theirs.
"""

import os
import tempfile
from pathlib import Path

os.environ |= {"DS_ACCELERATOR": "cpu", "DS_SKIP_CUDA_CHECK": "1", "WORLD_SIZE": "2"}
import deepspeed
import deepspeed.runtime.sequence_parallel.parallel_state_sp as mpu
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from deepspeed.utils import safe_get_full_grad


def gradient(rank: int, x: torch.Tensor, **zero: object) -> tuple[float, float]:
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16, bias=False)
    (right,) = torch.autograd.grad(model(x).square().sum(), [model.weight])
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "communication_data_type": "fp32",
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False, mpu=mpu
    )
    engine.backward(engine(x.chunk(2)[rank]).square().sum())
    return right.norm().item(), safe_get_full_grad(next(model.parameters())).norm().item()


def rank_main(rank: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "CCL_LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    mpu.initialize_sequence_parallel(sequence_parallel_size=2)
    x = torch.randn(6, 16, generator=torch.Generator().manual_seed(1))
    for zero in ({"stage": 1}, {"stage": 2}, {"stage": 3, "reduce_scatter": False}, {"stage": 3}):
        right, actual = gradient(rank, x, **zero)
        if rank == 0:
            print(f"{zero} right {right:.5f}  actual {actual:.5f}  ratio {actual / right:.3f}")
            Path(folder, "reproduced").unlink(missing_ok=True)
            if abs(actual / right - 0.5) < 1e-3:
                Path(folder, "reproduced").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    print(f"torch {torch.__version__}, deepspeed {deepspeed.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (folder,), nprocs=2, start_method="spawn")
        reproduced = Path(folder, "reproduced").exists()
    print("reproduced" if reproduced else "fixed in this version")
    raise SystemExit(not reproduced)
