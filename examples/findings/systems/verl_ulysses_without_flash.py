"""verl: Ulysses with sdpa or eager attention computes each rank's piece of the sequence alone, without an error.

Only the entry of flash attention is replaced by one that exchanges heads for tokens among the ranks of a sequence, and
the attention that the model is configured with is not looked at.
"""

import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import Qwen2Config, Qwen2ForCausalLM

RANKS, TOKENS = 2, 12


def tiny() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, attn_implementation="sdpa")).requires_grad_(False)


def rank_main(rank: int, folder: str) -> None:
    import verl.models.transformers.monkey_patch as patches
    from verl.utils import ulysses

    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    ids = torch.randint(32, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(TOKENS)[None]
    model = tiny()
    right = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
    patches.is_trl_available = lambda: False  # it would import a class that new releases of TRL do not have
    patches.apply_monkey_patch(model, use_remove_padding=True, ulysses_sp_size=RANKS)
    ulysses.set_ulysses_sequence_parallel_group(dist.group.WORLD)
    own, own_positions, _ = ulysses.ulysses_pad_and_slice_inputs(ids, positions, sp_size=RANKS)
    found = model(input_ids=own, position_ids=own_positions, use_cache=False).logits[0]
    mine = right[rank * TOKENS // RANKS : (rank + 1) * TOKENS // RANKS]
    if rank == RANKS - 1:
        targets = torch.arange(len(mine)) % 32
        for name, logits in (("right ", mine), ("actual", found)):
            print(f"{name} loss of the second half {torch.nn.functional.cross_entropy(logits, targets):.6f}")
        if float((found - mine).norm() / mine.norm()) > 1e-3:
            Path(folder, "reproduced").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    from importlib.metadata import version

    print(f"torch {torch.__version__}, transformers {version('transformers')}, verl {version('verl')}")
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (folder,), nprocs=RANKS, start_method="spawn")
        reproduced = Path(folder, "reproduced").exists()
    print("reproduced" if reproduced else "fixed in this version")
    raise SystemExit(not reproduced)
