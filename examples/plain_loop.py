"""A plain PyTorch loop under test: ``python examples/plain_loop.py FOLDER [padded|packed] [MICROBATCHES]``."""

import sys

import torch
from tiny_model import tiny_model
from torch.nn.utils.rnn import pad_sequence

from regress import record

folder, layout, micros = [*sys.argv[1:], *("padded", "1")[len(sys.argv) - 2 :]]
model = tiny_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
starts = [3, 3, 3, 4, 4, 4]  # lengths of the prompts
samples = [torch.randint(64, (start + 4 + 2 * n,)) for n, start in enumerate(starts)]
advantages = [1.1, -0.3, -0.8, 0.2, 0.8, -1.0]
total = sum(len(sample) for sample in samples) - sum(starts)


def arrange(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(rows)[None] if layout == "packed" else pad_sequence(rows, batch_first=True)


with record(folder, model, token_gradient=True):
    for _ in range(2):
        for micro in torch.arange(6).chunk(int(micros)):
            own = [(samples[n], torch.arange(len(samples[n])), advantages[n], starts[n]) for n in micro]
            inputs = {"input_ids": arrange([ids for ids, *_ in own])}
            inputs["position_ids"] = arrange([positions for _, positions, *_ in own])
            if layout == "padded":
                inputs["attention_mask"] = arrange([torch.ones_like(ids) for ids, *_ in own])
            weights = arrange([advantage * (at >= start) / total for _, at, advantage, start in own])
            log_p = model(**inputs).logits[:, :-1].log_softmax(-1)
            log_p = log_p.gather(-1, inputs["input_ids"][:, 1:, None])[..., 0]
            (-(log_p - log_p.detach()).exp() * weights[:, 1:]).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
