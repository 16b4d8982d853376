"""transformers, tensor parallel: with more than one microbatch the gradients of q_norm and k_norm are wrong.

The hook that sums them over the ranks sums, at every microbatch, all that has accumulated: on k ranks the microbatch
that is followed by n others counts k**n times. Losses and all other gradients are right.
"""

import os
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.distributed import DistributedConfig

transformers.logging.disable_progress_bar()
RANKS = 2
TOKENS = torch.randint(64, (4, 2, 16), generator=torch.Generator().manual_seed(1))  # four microbatches


def train(folder: str, *weights: float, **how: object) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = Qwen3ForCausalLM.from_pretrained(f"{folder}/model", **how)
    losses = [model(input_ids=tokens, labels=tokens).loss for tokens in TOKENS]
    for loss, weight in zip(losses, weights, strict=True):
        (weight * loss).backward()
    return torch.stack(losses), {name: p.grad for name, p in model.named_parameters() if "_norm." in name}


def rank_main(rank: int, folder: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    losses, actual = train(folder, 1, 1, 1, 1, distributed_config=DistributedConfig(tp_size=RANKS))
    expected, right = train(folder, 1, 1, 1, 1)
    _, predicted = train(folder, 8, 4, 2, 1)
    if rank == 0:
        print(f"losses\n right  {expected.tolist()}\n actual {losses.tolist()}\nnorms of gradients")
        for name in right:
            a, b, c = (gradients[name].norm().item() for gradients in (right, actual, predicted))
            print(f"{name[13:]:24} right {a:.5f}  actual {b:.5f}  ratio {b / a:.3f}  predicted {c:.5f}")
        if any((actual[name] - right[name]).norm() > 0.1 * right[name].norm() for name in right):
            Path(folder, "reproduced").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3}
    config = Qwen3Config(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=64, **heads)
    with tempfile.TemporaryDirectory() as folder:
        Qwen3ForCausalLM(config).save_pretrained(f"{folder}/model")
        mp.start_processes(rank_main, (folder,), nprocs=RANKS, start_method="forkserver")
        reproduced = Path(folder, "reproduced").exists()
    print("reproduced" if reproduced else "fixed in this version")
    raise SystemExit(not reproduced)
