"""torch FSDP2: a gradient divide factor acts twice in float64 and float16 when the shard mesh has one rank.

Expert parallelism sets such a factor on experts, which are then sharded over whatever is left of the mesh: often one
rank. In float32 and bfloat16 the factor acts once, unless set_force_sum_reduction_for_comms(True).
"""

import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FACTOR = 4.0


def gradient(dtype: torch.dtype, factor: float | None, force_sum: bool = False) -> float:
    layer = torch.nn.Linear(1, 1, bias=False, dtype=dtype)
    sharded = fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    if factor is not None:
        sharded.set_gradient_divide_factor(factor)
        sharded.set_force_sum_reduction_for_comms(force_sum)
    layer(torch.full((1, 1), 16.0, dtype=dtype)).sum().backward()
    return float(layer.weight.grad.full_tensor())


if __name__ == "__main__":
    print(f"torch {torch.__version__}, gradient 16, set_gradient_divide_factor({FACTOR})")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        reproduced = False
        for force_sum in (False, True):
            for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
                right, actual = gradient(dtype, None) / FACTOR, gradient(dtype, FACTOR, force_sum)
                print(f"{force_sum=!s:5} {dtype!s:15} right {right}  actual {actual}  ratio {actual / right}")
                reproduced |= actual != right
        dist.destroy_process_group()
    print("reproduced" if reproduced else "fixed in this version")
    raise SystemExit(not reproduced)
