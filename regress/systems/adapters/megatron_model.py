"""Megatron's GPT model in the shape of a Hugging Face one, in plain torch modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def transformer_config(found: Any, settings: Mapping[str, Any], *, by_tokens: bool) -> Any:
    """Return the configuration of Megatron's layers for a Hugging Face model in a layout."""
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    spread, again = bool(settings.get("spread")), bool(settings.get("recompute"))
    granularity = "full" if again else "selective" if settings.get("selective") else None
    overlapped = bool(settings.get("virtual")) and not settings.get("batched")
    return TransformerConfig(
        num_layers=found.num_hidden_layers,
        hidden_size=found.hidden_size,
        ffn_hidden_size=found.intermediate_size,
        num_attention_heads=found.num_attention_heads,
        num_query_groups=found.num_key_value_heads,
        kv_channels=getattr(found, "head_dim", None) or found.hidden_size // found.num_attention_heads,
        layernorm_epsilon=found.rms_norm_eps,
        normalization="RMSNorm",
        qk_layernorm=found.model_type in ("qwen3", "qwen3_moe"),
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=settings["tp"],
        pipeline_model_parallel_size=settings["pp"],
        virtual_pipeline_model_parallel_size=settings.get("virtual"),
        batch_p2p_comm=not overlapped,
        overlap_p2p_comm=overlapped,
        account_for_embedding_in_pipeline_split=spread,
        account_for_loss_in_pipeline_split=spread,
        sequence_parallel=bool(settings.get("sp")),
        recompute_granularity=granularity,
        recompute_method="uniform" if again else None,
        recompute_num_layers=1 if again else None,
        calculate_per_token_loss=by_tokens,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        deallocate_pipeline_outputs=False,
        attention_softmax_in_fp32=True,
        **_experts(found, settings),
    )


def _experts(found: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a mixture of experts, which a plain model has none of.

    Hugging Face normalizes the chosen experts' shares of a softmax over all, Megatron takes the softmax of the chosen.
    """
    if not getattr(found, "num_experts", None):
        return {}
    return {
        "num_moe_experts": found.num_experts,
        "moe_ffn_hidden_size": found.moe_intermediate_size,
        "moe_router_topk": found.num_experts_per_tok,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": settings.get("dispatcher", "alltoall"),
        "expert_model_parallel_size": settings.get("ep", 1),
    }


def build_model(config: Any, found: Any, settings: Mapping[str, Any], stage: int | None) -> Any:
    """Return the layers of this rank, or of one virtual stage of it."""
    from megatron.core import parallel_state as ranks
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import (
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )

    from regress.systems.adapters.megatron_shims import Norm

    qk_norm = config.qk_layernorm
    norm: Any = Norm if settings.get("sp") else WrappedTorchNorm
    experts = getattr(found, "num_experts", None)
    spec = get_gpt_layer_local_spec(experts, False, qk_norm, normalization="RMSNorm")
    if settings.get("sp"):
        inside = spec.submodules
        inside.input_layernorm = inside.pre_mlp_layernorm = norm
        if qk_norm:
            attention = inside.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = norm
    layers = get_num_layers_to_build(config, vp_stage=stage)
    virtual = {} if stage is None else {"vp_stage": stage}
    place: dict[str, Any] = {"ignore_virtual": stage is None, **virtual}
    return GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=norm),
        vocab_size=found.vocab_size,
        max_sequence_length=found.max_position_embeddings,
        pre_process=ranks.is_pipeline_first_stage(**place),
        post_process=ranks.is_pipeline_last_stage(**place),
        position_embedding_type="rope",
        rotary_base=int(found.rope_parameters["rope_theta"]),
        share_embeddings_and_output_weights=found.tie_word_embeddings,
        **virtual,
    )
