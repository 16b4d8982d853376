"""Models and tokenizer of a run."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from regress.engine.config.sections.value import value

FAMILIES = ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "llama", "gpt2")
"""Families with a group of their own, `model=NAME`; golden cases watch each of them."""
DTYPES = ("float64", "float32", "bfloat16")
BACKENDS = ("eager", "aot_eager", "inductor")
ATTENTIONS = ("eager", "sdpa", "varlen")
BIASES = ("none", "all", "lora_only")
INITS = ("kaiming", "gaussian", "orthogonal", "random")


def other_families() -> Iterable[str]:
    """Return the names of all causal language models of the installed transformers, which is imported for it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()


@dataclass
class LoraConfig:
    """Low-rank adapters of the policy (peft), which are trained in place of its parameters."""

    r: int | None = value(None, "rank of the adapters; null: none, all parameters are trained", minimum=1)
    alpha: float = value(8.0, "adapters are scaled by alpha / r", exclusive_minimum=0.0)
    dropout: float = value(0.0, "dropout before the adapters: only 0", minimum=0.0, exclusive_maximum=1.0)
    target_modules: list[str] = field(
        default_factory=list,
        metadata={
            "help": "ends of the names of the adapted modules, such as q_proj; [all-linear]: every linear layer but "
            "the output projection; empty: those that peft chooses for the architecture"
        },
    )
    layers_to_transform: list[int] = field(
        default_factory=list, metadata={"help": "numbers of the adapted blocks; empty: all"}
    )
    rank_pattern: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "ranks of single modules, by name or pattern"}
    )
    alpha_pattern: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "alphas of single modules, by name or pattern"}
    )
    bias: str = value(
        "none", "biases that are trained besides: none, all, or those of adapted modules", choices=BIASES
    )
    use_rslora: bool = value(False, "adapters are scaled by alpha / sqrt(r)")
    init_lora_weights: str = value(
        "kaiming",
        "first weights: kaiming or gaussian A and zero B (the policy starts as its base model), orthogonal (A B is "
        "zero), or random (A and B, for tests)",
        choices=INITS,
    )
    base_path: str | None = value(
        None,
        "directory of the model under the adapter in model.path; null: the one that its adapter_config.json names",
    )
    save_merged: bool = value(False, "save the whole model with the adapter merged in, in final/merged, too")


ROUTER_SCOPES = ("global", "microbatch")


@dataclass
class ModelConfig:
    """Policy model."""

    path: str | None = value(
        None,
        "checkpoint directory, or name on the Hugging Face hub, of a model or of an adapter; null: a tiny seeded model "
        "of `family`",
    )
    family: str = value(
        "qwen3",
        "architecture of the tiny seeded model, by its model_type: any causal language model of transformers",
        choices=FAMILIES,
        more=other_families,
        others="the model_type of another causal language model of transformers",
    )
    config: dict[str, Any] = field(
        default_factory=dict,
        metadata={"help": "values that override the Hugging Face configuration, e.g. hidden_size: 64"},
    )
    tie_word_embeddings: bool = value(False, "input and output embeddings are one parameter")
    dtype: str = value("float32", "precision of weights and computation", choices=DTYPES)
    attn_implementation: str = value(
        "sdpa",
        "attention: eager, sdpa (eager for a model that has none, such as Gemma 2), or varlen (packed sequences one "
        "by one)",
        choices=ATTENTIONS,
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
    router_coef: float = value(
        0.0,
        "coefficient of the load-balancing loss of a mixture of experts: experts times the sum over experts of their "
        "share of the chosen ones times their mean probability, over all tokens and layers (arXiv 2101.03961)",
        minimum=0.0,
    )
    router_scope: str = value(
        "global",
        "tokens of the load-balancing loss: the mini-batch over all microbatches and ranks, or each microbatch, over "
        "which the loss is then the mean (TRL)",
        choices=ROUTER_SCOPES,
    )
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class TokenizerConfig:
    """Tokenizer."""

    path: str | None = value(
        None, "tokenizer directory, or name on the hub; null: trained from the text of the task"
    )


@dataclass
class ReferenceConfig:
    """Reference model of the KL term."""

    path: str | None = value(
        None, "checkpoint directory, or name on the hub; null: the policy as it is before the first rollout"
    )
    without_adapter: bool = value(
        False, "model.lora: the base model is the reference, whatever the adapter is before the first rollout"
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
