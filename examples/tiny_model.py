"""The model of the other examples: a Qwen3 of two layers with the same random weights every time."""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


def tiny_model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "head_dim": 8,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, initializer_range=0.3, use_cache=False))
