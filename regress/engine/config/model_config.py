"""Models, adapters and tokenizer of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from regress.engine.config.config_messages import in_yaml
from regress.engine.config.config_option import (
    Bounds,
    Flag,
    Fraction,
    NonNegative,
    Origins,
    Positive,
    Section,
    Size,
    one_of,
)

if TYPE_CHECKING:
    from regress.engine.config.batching_config import ParallelConfig
    from regress.engine.config.config_schema import Config


FAMILIES = ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "llama", "gpt2")
"""Families with a group of their own, `model=NAME`; golden cases watch each of them."""
OTHER_FAMILIES = "the model_type of another causal language model of transformers"
DTYPES = ("float64", "float32", "bfloat16")
BACKENDS = ("eager", "aot_eager", "inductor")
ATTENTIONS = ("eager", "sdpa", "varlen")
BIASES = ("none", "all", "lora_only")
INITS = ("kaiming", "gaussian", "orthogonal", "random")
ROUTER_SCOPES = ("global", "microbatch")


def other_families() -> Iterable[str]:
    """Return the names of all causal language models of the installed transformers, which is imported for it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()


@dataclass
class LoraConfig(Section):
    """Low-rank adapters of the policy (peft), which are trained in place of its parameters."""

    r: Size | None = None
    """rank of the adapters; null: none, all parameters are trained"""
    alpha: Positive = 8.0
    """adapters are scaled by alpha / r"""
    dropout: Annotated[float, Bounds(least=0, below=1)] = 0.0
    """dropout before the adapters: only 0"""
    target_modules: list[str] = field(default_factory=list)
    """ends of the names of the adapted modules, such as q_proj; [all-linear]: every linear layer but the output
    projection; empty: those that peft chooses for the architecture"""
    layers_to_transform: list[int] = field(default_factory=list)
    """numbers of the adapted blocks; empty: all"""
    rank_pattern: dict[str, Any] = field(default_factory=dict)
    """ranks of single modules, by name or pattern"""
    alpha_pattern: dict[str, Any] = field(default_factory=dict)
    """alphas of single modules, by name or pattern"""
    bias: Annotated[str, one_of(*BIASES)] = "none"
    """biases that are trained besides: none, all, or those of adapted modules"""
    use_rslora: bool = False
    """adapters are scaled by alpha / sqrt(r)"""
    init_lora_weights: Annotated[str, one_of(*INITS)] = "kaiming"
    """first weights: kaiming or gaussian A and zero B (the policy starts as its base model), orthogonal (A B is zero),
    or random (A and B, for tests)"""
    base_path: str | None = None
    """directory of the model under the adapter in model.path; null: the one that its adapter_config.json names"""
    save_merged: bool = False
    """save the whole model with the adapter merged in, in final/merged, too"""

    def conflicts(self, run: Config, origin: Origins) -> Iterator[str]:
        adapts = run.uses_adapter
        for option, value in () if adapts else run.options_below("model.lora"):
            if value != option.default and option.key != "model.lora.base_path":
                yield f"""{option.key}={in_yaml(value)} means nothing with model.lora.r=null, which trains all
                parameters; set model.lora.r to the rank of the adapters, or leave {option.key} away."""
        if self.dropout:
            yield f"""model.lora.dropout={self.dropout:g} would draw other values in the sampler and in every pass of
            the trainer, so that ratios differ from 1 although the policy has not changed; set model.lora.dropout=0."""
        if "all-linear" in self.target_modules and len(self.target_modules) > 1:
            yield f"""model.lora.target_modules={in_yaml(self.target_modules)} names all-linear beside other modules;
            give all-linear alone, or the names of the modules."""
        for name, rank in self.rank_pattern.items():
            if type(rank) is not int or rank < 1:
                words = "has to be a whole number from 1; correct it."
                yield f"model.lora.rank_pattern.{name}={in_yaml(rank)} {words}"
        for name, alpha in self.alpha_pattern.items():
            if type(alpha) not in (int, float) or alpha < 0:
                yield f"model.lora.alpha_pattern.{name}={in_yaml(alpha)} has to be a number; correct it."
        if adapts and run.parallel.tp > 1 and run.parallel.tp_implementation != "torch":
            yield """parallel.tp_implementation=transformers has no plan for the adapters of model.lora; set
            parallel.tp_implementation=torch."""


@dataclass
class ModelConfig(Section):
    """Policy model."""

    path: Annotated[str | None, Flag("model-name", "DIR|NAME")] = None
    """checkpoint directory, or name on the Hugging Face hub, of a model or of an adapter; null: a tiny seeded model of
    `family`"""
    family: Annotated[str, Bounds(choices=FAMILIES, more=other_families, others=OTHER_FAMILIES)] = "qwen3"
    """architecture of the tiny seeded model, by its model_type: any causal language model of transformers"""
    config: dict[str, Any] = field(default_factory=dict)
    """values that override the Hugging Face configuration, e.g. hidden_size: 64"""
    tie_word_embeddings: bool = False
    """input and output embeddings are one parameter"""
    dtype: Annotated[str, one_of(*DTYPES)] = "float32"
    """precision of weights and computation"""
    attn_implementation: Annotated[str, one_of(*ATTENTIONS)] = "sdpa"
    """attention: eager, sdpa (eager for a model that has none, such as Gemma 2), or varlen (packed sequences one by
    one)"""
    attention: str | None = None
    """your own attention in place of attn_implementation, as package.module:function with the signature of
    transformers' attention functions; its mask is boolean, [B, 1, T, T]; null: none"""
    patch: str | None = None
    """what is done to the built model, as package.module:function: takes the model, and changes it in place or returns
    another; null: nothing"""
    compile: Annotated[str, one_of(*BACKENDS)] | None = None
    """backend of torch.compile that trains the transformer blocks (the sampler is never compiled); null: none"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass"""
    router_coef: NonNegative = 0.0
    """coefficient of the load-balancing loss of a mixture of experts: experts times the sum over experts of their share
    of the chosen ones times their mean probability, over all tokens and layers (arXiv 2101.03961)"""
    router_scope: Annotated[str, one_of(*ROUTER_SCOPES)] = "global"
    """tokens of the load-balancing loss: the mini-batch over all microbatches and ranks, or each microbatch, over which
    the loss is then the mean (TRL)"""
    lora: LoraConfig = field(default_factory=LoraConfig)

    def conflicts(self, run: Config, origin: Origins) -> Iterator[str]:
        by = origin(("model", "path")).author
        if self.path is not None and by == origin(("model", "family")).author:
            yield f"""model.path={self.path} and model.family={self.family} are both given ({by}), and the checkpoint
            already decides the family; leave model.family away or set model.path=null."""
        if self.path and self.tie_word_embeddings and by == origin(("model", "tie_word_embeddings")).author:
            yield f"""model.tie_word_embeddings=true is not read beside model.path={self.path}, whose config.json
            decides it; leave it away or edit config.json."""
        if self.attention is not None and self.attn_implementation != "sdpa":
            yield f"""model.attention={self.attention} takes the place of
            model.attn_implementation={self.attn_implementation}; set one of them to its default."""
        if self.compile is not None and self.attn_implementation == "varlen":
            yield f"""model.compile={self.compile} would compile model.attn_implementation=varlen anew for every layout;
            set model.attn_implementation=sdpa or model.compile=null."""
        if self.compile is not None and self.gradient_checkpointing:
            yield f"""model.compile={self.compile} decides by itself what the backward pass computes again, so that
            model.gradient_checkpointing=true cannot; set one of them to its default."""
        yield from self._router_conflicts(run.parallel)

    def _router_conflicts(self, parallel: ParallelConfig) -> Iterator[str]:
        if self.router_coef == 0.0:
            if self.router_scope != "global":
                yield f"""model.router_scope={self.router_scope} is not read while model.router_coef=0; give that a
                value or set model.router_scope=global."""
            return
        stated = f"model.router_coef={self.router_coef:g} adds a loss to every router"
        for name in ("tp", "pp", "cp"):
            if getattr(parallel, name) > 1:
                yield f"""{stated}, and parallel.{name}={getattr(parallel, name)} spreads the layers or tokens of a
                sample over ranks; set parallel.{name}=1, or share the work by parallel.dp, fsdp or ep."""
        if self.compile is not None:
            yield f"{stated}, which model.compile={self.compile} would not see; set model.compile=null."


@dataclass
class TokenizerConfig(Section):
    """Tokenizer."""

    path: str | None = None
    """tokenizer directory, or name on the hub; null: trained from the text of the task"""


@dataclass
class ReferenceConfig(Section):
    """Reference model of the KL term."""

    path: str | None = None
    """checkpoint directory, or name on the hub; null: the policy as it is before the first rollout"""
    without_adapter: bool = False
    """model.lora: the base model is the reference, whatever the adapter is before the first rollout"""
    sync_every_n_steps: Size | None = None
    """update the reference model from the policy every so many steps; null: frozen"""
    mixup_alpha: Fraction = 1.0
    """share a of the policy in a synchronization: reference = a * policy + (1 - a) * reference"""

    def conflicts(self, run: Config, origin: Origins) -> Iterator[str]:
        given = {"path": self.path, "sync_every_n_steps": self.sync_every_n_steps}
        sync = f"reference.sync_every_n_steps={self.sync_every_n_steps}"
        for key, value in given.items():
            if value is not None and not run.algorithm.needs_reference:
                yield f"""reference.{key}={value} finds no reference model while algorithm.kl_coef=0; give
                algorithm.kl_coef a value or set reference.{key}=null."""
            if value is not None and self.without_adapter:
                yield f"""reference.without_adapter=true and reference.{key}={value} both decide what the reference is;
                set reference.{key}=null or reference.without_adapter=false."""
        if self.without_adapter:
            yield from self._adapter_conflicts(run)
        if self.sync_every_n_steps is None:
            return
        if run.trainer.type == "remote":
            yield f"""{sync} mixes weights, which lie in the service of trainer.type=remote; set
            reference.sync_every_n_steps=null."""
        if run.uses_adapter and self.path is not None:
            yield f"""{sync} copies the policy's adapter, which the model in reference.path={self.path} does not have;
            set one of them to null."""
        if run.uses_adapter and self.mixup_alpha != 1.0:
            yield f"""reference.mixup_alpha={self.mixup_alpha:g} mixes weights, and the product of mixed factors of an
            adapter is not a mixture of their products; set reference.mixup_alpha=1."""

    def _adapter_conflicts(self, run: Config) -> Iterator[str]:
        if not run.algorithm.needs_reference:
            yield """reference.without_adapter=true finds no reference model while algorithm.kl_coef=0; give
            algorithm.kl_coef a value or set reference.without_adapter=false."""
        if not run.uses_adapter and not run.trains_adapter_in_service:
            yield """reference.without_adapter=true finds no adapter while model.lora.r=null; set
            reference.without_adapter=false, or model.lora.r to a rank."""
        if run.model.lora.bias != "none":
            yield f"""reference.without_adapter=true cannot take trained biases (model.lora.bias={run.model.lora.bias})
            out of the base model; give its directory as reference.path, or set model.lora.bias=none."""
