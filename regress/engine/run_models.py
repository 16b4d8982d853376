"""Models of a run, refused where they cannot serve it: the policy, and the reference of the KL term."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from torch import nn
from transformers import PreTrainedModel

from regress.engine.attention import FULL, MASKED, SLIDING, layer_kinds, sliding_window
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.config.config_schema import Config
from regress.engine.config.model_config import LoraConfig, ModelConfig
from regress.engine.engine_ranks import World, raise_on_all_ranks
from regress.engine.log_prob_projection import require_plain_logits
from regress.engine.model_loading import build_model, place
from regress.engine.model_probe import require_computed
from regress.engine.recurrent_layers import KIND, recurrent_layers
from regress.errors import ConfigError
from regress.grpo.selective_log_softmax import Pieces


class Vocabulary(Protocol):
    """Properties of a tokenizer that a model has to fit; every tokenizer of transformers has them."""

    def __len__(self) -> int:
        """Return the number of tokens."""

    @property
    def pad_token_id(self) -> int:
        """Token that fills rows."""

    @property
    def eos_token_id(self) -> int:
        """Token that ends a completion."""


def build_policy(config: Config, tokenizer: Vocabulary, world: World) -> LocalPolicy:
    """Build the policy before any training, on its device or devices.

    Raises:
        ConfigError: if the model does not fit tokenizer or sequences, or cannot run.
    """
    return world.policy(
        raise_on_all_ranks(world, lambda: _model(config, config.model, tokenizer, "model")),
        compile=config.model.compile,
        log_prob_chunk_size=config.batching.log_prob_chunk_size,
        pieces=Pieces(config.batching.vocab_chunk_size, config.batching.softmax_block_size),
        temperature=config.rollout_worker.temperature,
        entropy_gradient=config.algorithm.has_entropy_term,
    )


def build_reference(config: Config, tokenizer: Vocabulary, policy: LocalPolicy) -> PreTrainedModel | None:
    """Build the model of ``reference.path``, in the policy's dtype and attention; ``None`` without a path.

    Raises:
        ConfigError: if the model does not fit tokenizer or sequences, cannot run, or is to be synchronized with a
            policy of other parameters.
    """
    if config.reference.path is None:
        return None
    model = reference_model(config, tokenizer)
    shapes = [{name: p.shape for name, p in m.named_parameters()} for m in (model, policy.architecture)]
    if config.reference.sync_every_n_steps is not None and shapes[0] != shapes[1]:
        name = min(name for name, _ in shapes[0].items() ^ shapes[1].items())
        raise ConfigError(f"""reference.path={config.reference.path!r}: its parameter {name} is not that of the policy,
        which reference.sync_every_n_steps would mix into it; give a checkpoint of the policy's architecture or set
        reference.sync_every_n_steps=null""")
    return model


def reference_model(config: Config, tokenizer: Vocabulary) -> PreTrainedModel:
    """Build the model of ``reference.path``, in the policy's dtype and attention.

    Raises:
        ConfigError: if it does not fit tokenizer or sequences, or cannot run.
    """
    assert config.reference.path is not None
    chosen = replace(config.model, path=config.reference.path, config={}, gradient_checkpointing=False)
    chosen.lora = LoraConfig()  # its directory says whether it has an adapter
    return _model(config, chosen, tokenizer, "reference")


def _model(config: Config, chosen: ModelConfig, tokenizer: Vocabulary, key: str) -> PreTrainedModel:
    model = build_model(
        chosen,
        seed=config.seed,
        vocab_size=len(tokenizer),
        pad_id=tokenizer.pad_token_id,
        eos_id=tokenizer.eos_token_id,
        key=key,
    )
    _require_positions(model, config, key)
    _require_served_attention(model, config, key)
    require_computed(model, config, key)
    if config.batching.log_prob_chunk_size is not None:
        require_plain_logits(model)
    return place(model, config.device)


def _require_positions(model: PreTrainedModel, config: Config, key: str) -> None:
    text = model.config.get_text_config()
    name = "n_positions" if hasattr(text, "n_positions") else "max_position_embeddings"
    positions = getattr(text, name, None)
    if positions is None or positions >= config.data.max_seq_length:
        return
    tokens = model.get_input_embeddings()
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and m is not tokens]
    if any(positions <= table.num_embeddings <= positions + 2 for table in tables):  # none: rotary positions
        raise ConfigError(f"""data.max_seq_length={config.data.max_seq_length}: the {key} has {positions} positions
        ({name}); lower data.max_seq_length or give a {key} with more""")


def _named(config: Config, key: str) -> str:
    """Return the key of the configuration that names a model, with its value."""
    if key == "model" and config.model.path is None:
        return f"model.family={config.model.family}"
    return f"{key}.path={config.model.path if key == 'model' else config.reference.path}"


def _require_served_attention(model: PreTrainedModel, config: Config, key: str) -> None:
    """Refuse layers that the engine's masks do not serve, and windows that its own attentions leave out: the sampler
    would apply them, and compute another function.
    """
    known = {FULL, SLIDING, *([KIND] if recurrent_layers(model) else [])}
    others = layer_kinds(model.config) - known
    if others:
        raise ConfigError(f"""{_named(config, key)}: the engine has no masks for its layers of the kind
        {", ".join(sorted(others))}, so trainer and sampler would compute different functions; set it to a model with
        full or sliding attention, such as qwen2""")
    window, longest = sliding_window(model.config), config.data.max_seq_length
    if window is None or window >= longest:
        return
    implementation = model.config._attn_implementation
    for chosen, plain in (
        (f"parallel.cp={config.parallel.cp}", config.parallel.cp > 1),
        (f"model.attn_implementation={implementation}", implementation not in MASKED),
    ):
        if plain and config.model.attention is None:
            raise ConfigError(f"""{chosen} has no sliding window, and that of the {key} is {window}, shorter than
            data.max_seq_length={longest}; set parallel.cp=1 and model.attn_implementation=eager, or shorten the
            sequences""")
