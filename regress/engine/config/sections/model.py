"""Models and tokenizer of a run."""

from dataclasses import dataclass, field
from typing import Any

from regress.engine.config.sections.value import value

FAMILIES = ("qwen3", "qwen3_moe", "llama", "gpt2")
DTYPES = ("float64", "float32", "bfloat16")
BACKENDS = ("eager", "aot_eager", "inductor")
ATTENTIONS = ("eager", "sdpa", "varlen")


@dataclass
class ModelConfig:
    """Policy model."""

    path: str | None = value(None, "local checkpoint directory; null: a tiny seeded model of `family`")
    family: str = value("qwen3", "architecture of the tiny seeded model", choices=FAMILIES)
    config: dict[str, Any] = field(
        default_factory=dict,
        metadata={"help": "values that override the Hugging Face configuration, e.g. hidden_size: 64"},
    )
    tie_word_embeddings: bool = value(False, "input and output embeddings are one parameter")
    dtype: str = value("float32", "precision of weights and computation", choices=DTYPES)
    attn_implementation: str = value(
        "sdpa", "attention: eager, sdpa, or varlen (packed sequences one by one)", choices=ATTENTIONS
    )
    attention: str | None = value(
        None,
        "your own attention in place of attn_implementation, as package.module:function with the signature of "
        "transformers' attention functions; its mask is boolean, [B, 1, T, T]; null: none",
    )
    patch: str | None = value(
        None,
        "what is done to the built model, as package.module:function: takes the model, and changes it in place or "
        "returns another; null: nothing",
    )
    compile: str | None = value(
        None,
        "backend of torch.compile that trains the transformer blocks (the sampler is never compiled); null: none",
        choices=BACKENDS,
    )
    gradient_checkpointing: bool = value(False, "recompute activations in the backward pass")


@dataclass
class TokenizerConfig:
    """Tokenizer."""

    path: str | None = value(None, "local tokenizer directory; null: trained from the text of the task")


@dataclass
class ReferenceConfig:
    """Reference model of the KL term."""

    path: str | None = value(
        None, "local checkpoint directory; null: the policy as it is before the first rollout"
    )
    sync_every_n_steps: int | None = value(
        None, "update the reference model from the policy every so many steps; null: frozen", minimum=1
    )
    mixup_alpha: float = value(
        1.0,
        "share a of the policy in a synchronization: reference = a * policy + (1 - a) * reference",
        exclusive_minimum=0.0,
        maximum=1.0,
    )
