"""One-time work of the replays' forkserver, shared by all ranks: imports, and tables that first use fills."""

# ruff: noqa: F401  # imported to be there

import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama
import transformers.models.qwen3.modeling_qwen3
import transformers.models.qwen3_moe.modeling_qwen3_moe
from transformers import conversion_mapping

import regress.engine.rollout_worker
import regress.engine.run_construction
import regress.parallel.distributed_ranks
import regress.parallel.launch.forked_rank
import regress.parallel.parallel_policy
import regress.replay.case_run
import regress.replay.program_replay

if hasattr(conversion_mapping, "get_checkpoint_conversion_mapping"):
    # a thousand regular expressions for checkpoints of all models: half the time of loading a small one
    conversion_mapping.get_checkpoint_conversion_mapping("qwen3")
