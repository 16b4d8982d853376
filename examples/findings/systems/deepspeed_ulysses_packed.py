"""DeepSpeed: Ulysses over sdpa throws the mask away, so the samples of a packed row attend to each other.

Log-probs of the second of two samples in one row, whose position ids begin again, as without Ulysses and alone.
"""

import os
import tempfile
from pathlib import Path

os.environ |= {"DS_ACCELERATOR": "cpu", "DS_SKIP_CUDA_CHECK": "1", "WORLD_SIZE": "2"}
import deepspeed
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def rank_main(rank: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "CCL_LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    torch.manual_seed(0)
    config = LlamaConfig(
        **SIZES, num_key_value_heads=2, vocab_size=32, initializer_range=0.5, use_cache=False
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    first, second = torch.randint(32, (1, 4)), torch.randint(32, (1, 4))
    row, positions = torch.cat([first, second], 1), torch.arange(4).repeat(1, 2)
    with torch.no_grad():
        alone = model(second).logits.log_softmax(-1)
        plain = model(row, position_ids=positions).logits[:, 4:].log_softmax(-1)
        UlyssesSPAttentionHF.register_with_transformers(
            model, core_attn_implementation="sdpa", sequence_parallel_size=2, micro_batch_size=1
        )
        own = model(row.chunk(2, 1)[rank], position_ids=positions.chunk(2, 1)[rank]).logits.log_softmax(-1)
    if rank == 1:
        for name, found in (("without Ulysses", plain), ("with Ulysses", own)):
            right, actual = (x[0, range(3), second[0, 1:]].tolist() for x in (alone, found))
            print(name, " right", [f"{x:.4f}" for x in right], " actual", [f"{x:.4f}" for x in actual])
        if torch.allclose(plain, alone, atol=1e-4) and not torch.allclose(own, alone, atol=1e-2):
            Path(folder, "reproduced").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    print(f"torch {torch.__version__}, deepspeed {deepspeed.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (folder,), nprocs=2, start_method="spawn")
        reproduced = Path(folder, "reproduced").exists()
    print("reproduced" if reproduced else "fixed in this version")
    raise SystemExit(not reproduced)
