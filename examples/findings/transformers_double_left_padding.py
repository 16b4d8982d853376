"""transformers: float64 with eager attention and left padding gives NaN.

The mask holds the smallest float64. The softmax is asked for in float32, where that is -inf: a padding row has no
finite score left, and its NaN reaches the other tokens as 0 * NaN in the next layer.
"""

import torch
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM

if __name__ == "__main__":
    torch.set_grad_enabled(False)
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
    tokens = torch.randint(64, (1, 12))
    mask = torch.cat([torch.zeros(1, 3), torch.ones(1, 12)], 1).long()
    padded = {"input_ids": torch.cat([tokens[:, :3], tokens], 1), "attention_mask": mask, "use_cache": False}
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found = {}
    for attention in ("sdpa", "eager"):
        model = Qwen3ForCausalLM._from_config(config, attn_implementation=attention)
        for dtype in (torch.float32, torch.float64):
            model = model.to(dtype)
            right = model(input_ids=tokens).logits
            logits = model(**padded, position_ids=positions).logits[:, 3:]
            error = float((logits - right).abs().max())
            found[attention, dtype] = int(logits.isnan().sum())
            print(
                f"{attention:5} {dtype!s:14} {found[attention, dtype]} of {logits.numel()} logits are NaN",
                end="",
            )
            print(
                f", right value of the first {right[0, 0, 0]:.6f}, actual {logits[0, 0, 0]:.6f}, error {error:.1e}"
            )
    reproduced = found["eager", torch.float64] > 0
    print("reproduced" if reproduced else "fixed in this version")
    raise SystemExit(not reproduced)
