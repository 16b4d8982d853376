"""transformers: in a packed row the state of linear attention runs on into the next sequence.

Positions that start again, which is all that DataCollatorWithFlattening gives by default, tell attention where a
sequence begins. Linear attention and its convolution read ``cu_seq_lens`` alone, which need kernels for GPUs.
"""

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, DataCollatorWithFlattening

SIZE = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 64, "head_dim": 8, "initializer_range": 0.1}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
WIDTHS = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, **WIDTHS}
MODELS = {"qwen3": {}, "qwen3_next": {**LINEAR, "num_experts": 0}, "qwen3_5_text": LINEAR}


def log_probs(model: torch.nn.Module, **inputs: torch.Tensor) -> torch.Tensor:
    """Return the log-prob of each token but the first of the row."""
    with torch.no_grad():
        found = model(**inputs, use_cache=False).logits[0, :-1].log_softmax(-1)
    return found.gather(1, inputs["input_ids"][0, 1:, None])[:, 0]


if __name__ == "__main__":
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    wrong = {}
    for family, more in MODELS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(family, **SIZE, **HEADS, **more)
        ).train()
        samples = [torch.randint(64, (12,)).tolist() for _ in range(2)]
        packed = DataCollatorWithFlattening()([{"input_ids": sample} for sample in samples])
        right = log_probs(model, input_ids=torch.tensor(samples[1:]))
        actual = log_probs(model, input_ids=packed["input_ids"], position_ids=packed["position_ids"])[12:]
        wrong[family] = float((actual - right).abs().max())
        print(
            f"{family:12} second sequence, mean log-prob: right {right.mean():.4f}  actual {actual.mean():.4f}  "
            f"largest difference {wrong[family]:.1e}"
        )
        lengths = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(
            [{"input_ids": s} for s in samples]
        )
        try:
            log_probs(model, **{key: value for key, value in lengths.items() if key != "labels"})
        except ValueError as error:
            print(f"{family:12} with cu_seq_lens: {error}")
    reproduced = wrong.pop("qwen3") < 1e-4 and max(wrong.values()) > 1e-2
    print("reproduced" if reproduced else "fixed in this version")
    raise SystemExit(not reproduced)
