"""torch parallelize_module: what stands between a column- and a row-parallel layer gets a partial gradient.

The q_norm and k_norm of Qwen3 see the heads of their rank only. They are in no plan, so nobody sums their gradients:
every rank has another one, and the replicas drift apart.
"""

import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import Qwen3Config, Qwen3ForCausalLM

RANKS = 2


def train(plan: dict[str, object]) -> tuple[float, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3}
    config = Qwen3Config(hidden_size=32, intermediate_size=64, num_hidden_layers=1, vocab_size=64, **heads)
    model, tokens = Qwen3ForCausalLM(config), torch.randint(64, (2, 16))
    parallelize_module(model, init_device_mesh("cpu", (RANKS,)), plan)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if "_norm." in name}


def rank_main(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    columns = {f"model.layers.*.self_attn.{letter}_proj": ColwiseParallel() for letter in "qkv"}
    expected, right = train({})
    loss, actual = train({**columns, "model.layers.*.self_attn.o_proj": RowwiseParallel()})
    print(f"rank {rank}: loss right {expected:.6f}  actual {loss:.6f}; norms of gradients:")
    for name in right:
        a, b, off = (g.norm().item() for g in (right[name], actual[name], actual[name] - right[name]))
        dist.all_reduce(actual[name])
        size = f"right {a:.5f}  actual {b:.5f}  ratio {b / a:.3f}  off by {off / a:.0%}"
        print(f"rank {rank}: {name[25:31]} {size}  summed over the ranks {actual[name].norm().item():.5f}")
        if off > 0.1 * a:
            Path(folder, "reproduced").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (folder,), nprocs=RANKS, start_method="forkserver")
        reproduced = Path(folder, "reproduced").exists()
    print("reproduced" if reproduced else "fixed in this version")
    raise SystemExit(not reproduced)
