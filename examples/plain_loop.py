"""A plain PyTorch loop under test: ``python examples/plain_loop.py FOLDER [padded|packed] [SAMPLES_A_MICROBATCH]``."""

import sys

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3Config, Qwen3ForCausalLM

from regress.capture import record

folder, layout, size = [*sys.argv[1:], *("padded", "6")[len(sys.argv) - 2 :]]
torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
model = Qwen3ForCausalLM(Qwen3Config(vocab_size=64, initializer_range=0.3, use_cache=False, **sizes, **heads))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
prompts = [torch.randint(64, (3 + group,)) for group in (0, 0, 0, 1, 1, 1)]
samples = [torch.cat([prompt, torch.randint(64, (4 + 2 * n,))]) for n, prompt in enumerate(prompts)]
advantages = [1.1, -0.3, -0.8, 0.2, 0.8, -1.0]
total = sum(len(sample) - len(prompt) for sample, prompt in zip(samples, prompts, strict=True))


def arrange(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(rows)[None] if layout == "packed" else pad_sequence(rows, batch_first=True)


with record(folder, model, token_gradient=True):
    for _ in range(2):
        for micro in torch.arange(len(samples)).split(int(size)):
            own = [samples[n] for n in micro]
            inputs = {"input_ids": arrange(own), "position_ids": arrange([torch.arange(len(s)) for s in own])}
            if layout == "padded":
                inputs["attention_mask"] = arrange([torch.ones_like(s) for s in own])
            weights = [advantages[n] * (torch.arange(len(samples[n])) >= len(prompts[n])) / total for n in micro]
            log_p = model(**inputs).logits[:, :-1].log_softmax(-1)
            log_p = log_p.gather(-1, inputs["input_ids"][:, 1:, None])[..., 0]
            (-(log_p - log_p.detach()).exp() * arrange(weights)[:, 1:]).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
