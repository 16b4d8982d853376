"""transformers: a model after ``.double()`` is as far from the exact result as a float32 model.

Norms, softmax, rotary embeddings and routers ask for float32 by name. The mode below gives them float64 instead.
"""

from typing import Any

import torch
import transformers
from torch.overrides import TorchFunctionMode
from transformers import Qwen3Config, Qwen3ForCausalLM


class TrueFloat64(TorchFunctionMode):
    """Whoever asks for float32 gets float64."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = torch.Tensor.double if function is torch.Tensor.float else function
        args = [torch.float64 if value is torch.float32 else value for value in args]
        named = {
            key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()
        }
        return function(*args, **named)


def gradients(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    model(input_ids=tokens, labels=tokens).loss.backward()
    return torch.cat([parameter.grad.double().flatten() for parameter in model.parameters()])


if __name__ == "__main__":
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3}
    config = Qwen3Config(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=64, **heads)
    tokens = torch.randint(64, (2, 24))
    print("error of the gradient, relative:")
    doubles = []
    for attention in ("eager", "sdpa"):
        model = Qwen3ForCausalLM._from_config(config, attn_implementation=attention)
        values = gradients(model, tokens), gradients(model.double(), tokens)
        with TrueFloat64():
            truth = gradients(model, tokens)
        single, double = (float((value - truth).norm() / truth.norm()) for value in values)
        doubles.append(double)
        print(
            f"{attention:5} right 1e-15  actual {double:.1e}  ratio {double / 1e-15:.0e}  (float32: {single:.1e})"
        )
    reproduced = min(doubles) > 1e-9
    print("reproduced" if reproduced else "fixed in this version")
    raise SystemExit(not reproduced)
