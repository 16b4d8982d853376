"""A plain PyTorch loop under test, padded and packed: ``python examples/plain_loop.py A B``; ``regress compare A B``."""

import sys

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from regress.capture import record

SAMPLES = [torch.randint(2, 64, (n,), generator=torch.Generator().manual_seed(n)) for n in (5, 9, 7, 4)]
CONFIG = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "use_cache": False,
}


def padded():
    ids = torch.nn.utils.rnn.pad_sequence(SAMPLES, batch_first=True, padding_value=0)
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}, ids[:, 1:] > 0


def packed():
    positions = torch.cat([torch.arange(len(sample)) for sample in SAMPLES])[None]
    return {"input_ids": torch.cat(SAMPLES)[None], "position_ids": positions}, positions[:, 1:] > 0


def train(folder, inputs, mask):
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(num_attention_heads=4, num_key_value_heads=2, head_dim=8, **CONFIG))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with record(folder, model, token_gradient=True):
        for _ in range(2):
            log_p = model(**inputs).logits[:, :-1].log_softmax(-1)
            losses = -log_p.gather(-1, inputs["input_ids"][:, 1:, None])[..., 0]
            ((losses * mask).sum() / mask.sum()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


train(sys.argv[1], *padded())
train(sys.argv[2], *packed())
