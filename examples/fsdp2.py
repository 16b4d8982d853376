"""FSDP2 under test: ``torchrun --nproc-per-node 2 examples/fsdp2.py FOLDER``; on one rank: ``python ... FOLDER``."""

import os
import sys

import torch
from tiny_model import tiny_model
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from regress import record

rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
model = tiny_model()
samples = torch.randint(64, (4, 9))
advantages = torch.tensor([1.2, -0.4, 0.3, -1.1])
if world > 1:
    distributed.init_process_group("gloo")
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with record(sys.argv[1], model, token_gradient=True):
    for _ in range(2):
        ids = samples[rank::world]
        log_p = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, :-1].log_softmax(-1)
        log_p = log_p.gather(-1, ids[:, 1:, None])[..., 0]
        loss = -((log_p - log_p.detach()).exp() * advantages[rank::world, None]).sum() / (4 * 8)
        (loss * world).backward()  # FSDP2 averages gradients over the ranks; the loss is a sum over them
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
if world > 1:
    distributed.destroy_process_group()
