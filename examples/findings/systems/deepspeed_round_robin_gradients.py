"""DeepSpeed: with round_robin_gradients, the doors to whole parameters and gradients open onto other parameters.

`safe_get_full_fp32_param` and `safe_get_full_grad` look for a parameter in the flat buffer at the place that it has
without round_robin_gradients; the optimizer itself is right. Equal sizes make it silent.
"""

import os
import tempfile
from pathlib import Path

os.environ |= {"DS_ACCELERATOR": "cpu", "DS_SKIP_CUDA_CHECK": "1", "WORLD_SIZE": "2"}
import deepspeed
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 2, "round_robin_gradients": True},
    "zero_allow_untested_optimizer": True,
    "communication_data_type": "fp32",
}


def rank_main(rank: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "CCL_LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, 32, bias=False) for _ in range(4)]
    model = torch.nn.Sequential(*layers)
    x = torch.randn(1, 32)
    right = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=CONFIG, dist_init_required=False
    )
    engine.backward(engine(x).square().mean())
    for number, p in enumerate(model.parameters()):
        weight, gradient = safe_get_full_fp32_param(p), safe_get_full_grad(p)
        if rank == 0:
            print(f"layer {number} weight   right {p.norm():.5f}  actual {weight.norm():.5f}")
            print(f"layer {number} gradient right {right[number].norm():.5f}  actual {gradient.norm():.5f}")
            if not torch.allclose(weight, p) and not torch.allclose(gradient, right[number], rtol=1e-3):
                Path(folder, "reproduced").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    print(f"torch {torch.__version__}, deepspeed {deepspeed.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (folder,), nprocs=2, start_method="spawn")
        reproduced = Path(folder, "reproduced").exists()
    print("reproduced" if reproduced else "fixed in this version")
    raise SystemExit(not reproduced)
