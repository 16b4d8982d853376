"""transformers: the sequences of a packed row see each other with the default cache, and with a mask of ones.

Positions that start again tell packed sequences apart only where there is neither a cache nor an attention mask. The
default of a model is to make a cache.
"""

import torch
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM

if __name__ == "__main__":
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    torch.manual_seed(0)
    size = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "vocab_size": 64,
        "head_dim": 8,
        "initializer_range": 0.3,
    }
    config = Qwen3Config(**size, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    model = Qwen3ForCausalLM(config).train()
    first, second = torch.randint(64, (1, 12)), torch.randint(64, (1, 12))

    def loss_of_second(**how: object) -> float:
        packed = {
            "input_ids": torch.cat([first, second], 1),
            "position_ids": torch.cat([torch.arange(12), torch.arange(12)])[None],
            "labels": torch.cat([torch.full_like(first, -100), second[:, :1] * 0 - 100, second[:, 1:]], 1),
        }
        return model(**packed, **how).loss.item()

    right = model(input_ids=second, labels=second).loss.item()
    print(f"{'the second sequence alone':45} right {right:.6f}")
    ways = {
        "packed, use_cache=False": {"use_cache": False},
        "packed, use_cache by default": {},
        "packed, use_cache=False, attention_mask=ones": {
            "use_cache": False,
            "attention_mask": torch.ones(1, 24),
        },
    }
    losses = {way: loss_of_second(**how) for way, how in ways.items()}
    for way, loss in losses.items():
        print(f"{way:45} actual {loss:.6f}  ratio {loss / right:.4f}")
    no_cache, *others = [abs(loss - right) > 1e-3 for loss in losses.values()]
    reproduced = not no_cache and any(others)
    print("reproduced" if reproduced else "fixed in this version")
    raise SystemExit(not reproduced)
