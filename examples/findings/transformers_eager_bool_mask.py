"""transformers: an explicit 4D mask of booleans masks nothing under eager attention.

sdpa reads True as "attend". eager adds the mask to the scores: True adds 1, False adds 0, and every token sees every
other, the future included.
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
    model = Qwen3ForCausalLM(config)
    tokens = torch.randint(64, (1, 12))
    causal = torch.ones(12, 12, dtype=torch.bool).tril()[None, None]
    additive = torch.zeros(1, 1, 12, 12).masked_fill(~causal, torch.finfo(torch.float32).min)

    def loss(attention: str, mask: torch.Tensor) -> float:
        model.set_attn_implementation(attention)
        return model(input_ids=tokens, labels=tokens, attention_mask=mask).loss.item()

    right = loss("sdpa", causal)
    others = {"eager, additive": loss("eager", additive), "eager, bool": loss("eager", causal)}
    print(f"sdpa, bool        right {right:.6f}")
    for way, value in others.items():
        print(f"{way:17} actual {value:.6f}  ratio {value / right:.4f}")
    reproduced = abs(others["eager, bool"] - right) > 1e-3 > abs(others["eager, additive"] - right)
    print("reproduced" if reproduced else "fixed in this version")
    raise SystemExit(not reproduced)
