"""`regress oracle` of trainers of the models that people train, each right, with a planted fault, and mended."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

sys.path.insert(0, str(Path(__file__).parent))
from plain_loop import train

from regress import true_float64
from regress.cli import main

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SIZES: Mapping[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
WINDOW = {"sliding_window": 3}  # shorter than any sample
KINDS = {"layer_types": ["sliding_attention", "full_attention"], **WINDOW}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": True, **KINDS},
    "gemma2": {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.0, **KINDS},
    "llama": {},
    "mistral": WINDOW,
    "mixtral": {**WINDOW, "num_local_experts": 4},
    "gemma": {},
    "gemma3_text": KINDS,
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": WINDOW,
    "olmo": {},
    "olmo2": {},
    "olmo3": KINDS,
    "olmoe": EXPERTS,
    "qwen2_moe": {**EXPERTS, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, **KINDS},
    "granite": {"logits_scaling": 2.0},
    "stablelm": {},
    "glm": {},
    "glm4": {},
    "cohere": {},
    "cohere2": KINDS,
    "smollm3": {},
    "starcoder2": WINDOW,
    "gpt_neox": {},
    "falcon": {},
}
QUICK = ("qwen2", "gemma2")


def model_of(family: str, own: Mapping[str, Any] | None = None) -> PreTrainedModel:
    plain = AutoConfig.for_model(family)
    known = {*plain.to_dict(), *plain.attribute_map}
    sizes = {key: value for key, value in SIZES.items() if key in known}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(sizes | (FAMILIES[family] if own is None else {**own})))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


@contextmanager
def mixed_mlp(model: PreTrainedModel) -> Iterator[None]:
    """A hundredth of each feature of the first layer's MLP goes into the next one, too."""

    def mixed(_: nn.Module, __: Any, output: Any) -> Any:
        first, *others = output if isinstance(output, tuple) else (output,)
        first = first + 0.01 * first.roll(1, -1)
        return (first, *others) if others else first

    name = next(name for name, _ in model.named_modules() if name.endswith(".mlp"))
    handle = model.get_submodule(name).register_forward_hook(mixed)
    try:
        yield
    finally:
        handle.remove()


def judged(folder: Path) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["oracle", str(folder), "--preset", "dapo"])
    return result.exit_code, result.output + repr(result.exception)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "family",
    [pytest.param(one, marks=[] if one in QUICK else pytest.mark.extended) for one in FAMILIES],
)
def test_a_planted_fault_is_found_and_its_fix_is_green(family: str, tmp_path: Path) -> None:
    train(tmp_path / "right", model=model_of(family))
    code, said = judged(tmp_path / "right")
    assert code == 0, said
    model = model_of(family)
    with mixed_mlp(model):
        train(tmp_path / "wrong", model=model, updates=1)
    code, said = judged(tmp_path / "wrong")
    assert code == 1, said
    assert "log_probs" in said


LEARNED: dict[str, dict[str, Any]] = {
    "gpt2": {"n_positions": 10, **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)},
    "gpt_bigcode": {"n_positions": 10, **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)},
    "opt": {"max_position_embeddings": 10, "dropout": 0.0, "ffn_dim": 32, "word_embed_proj_dim": 16},
    "gpt_neo": {
        "max_position_embeddings": 10,
        "attention_types": [[["global"], 2]],
        **dict.fromkeys(("resid_dropout", "embed_dropout", "attention_dropout"), 0.0),
    },
}
"""Models with a table of positions, as long as the longest sample."""


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=[] if one == "gpt2" else pytest.mark.extended) for one in LEARNED]
)
def test_a_table_of_positions_needs_no_more_than_the_longest_sample(family: str, tmp_path: Path) -> None:
    train(tmp_path / "dump", model=model_of(family, LEARNED[family]), updates=1)
    code, said = judged(tmp_path / "dump")
    assert code == 0, said


@pytest.mark.parametrize(
    "inside", [True, pytest.param(False, marks=pytest.mark.extended)], ids=["built inside", "built before"]
)
def test_a_trainer_in_true_float64(inside: bool, tmp_path: Path) -> None:
    """Rotary frequencies, which no checkpoint holds, are those of the dtype that the trainer built its model in."""
    before = None if inside else model_of("qwen2").double()
    with true_float64():
        train(tmp_path / "dump", model=before or model_of("qwen2").double(), updates=1)
    code, said = judged(tmp_path / "dump")
    assert code == 0, said
