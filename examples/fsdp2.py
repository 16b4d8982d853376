"""FSDP2 on two CPU ranks under test: ``torchrun --nproc-per-node 2 examples/fsdp2.py FOLDER``; alone it is one rank."""

import os
import sys

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from regress.capture import record

RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}

torch.manual_seed(0)
ids = torch.randint(2, 64, (4, 12))
model = Qwen3ForCausalLM(Qwen3Config(vocab_size=64, num_key_value_heads=2, head_dim=8, **SIZES))
if RANKS > 1:
    torch.distributed.init_process_group("gloo")
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())

optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
own = ids[RANK::RANKS]
with record(sys.argv[1], model, token_gradient=True):
    for _ in range(2):
        logits = model(input_ids=own, attention_mask=torch.ones_like(own), use_cache=False).logits[:, :-1]
        log_probs = logits.log_softmax(-1).gather(-1, own[:, 1:, None])
        (-log_probs.mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
if RANKS > 1:
    torch.distributed.destroy_process_group()
