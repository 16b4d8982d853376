"""Faults of one block of a model: its activation function, or the way back through its values."""

from __future__ import annotations

from typing import Any

from torch import nn

from regress.engine.build import Run
from tests.faults.fault import fault


@fault(
    category="T",
    fresh=True,
    source="gelu for gelu_new: a kernel that knows one of the two",
    cases=("gpt2",),
    variants=("varlen",),
    first="activations transformer.h.1",
    names=r"transformer\.(h\.1|ln_f)|lm_head",
    rules=("module",),  # names its activation function
)
def exact_gelu_in_the_last_block(run: Run) -> None:
    """The last block computes GELU by its integral, where the model was made with the approximation by tanh."""
    model: Any = run.trainer.policy.model
    model.transformer.h[-1].mlp.act = nn.GELU()


@fault(
    category="R",
    fresh=True,
    source="a cache of values that is read without a graph",
    variants=("dp2",),
    first="gradient",
    names=r"model\.(embed_tokens|layers\.0|layers\.1\.(input_layernorm|self_attn\.v_proj))\..*",
    ranks=(0, 1),
    rules=(
        "gradient-zero",
        "gradient-missing",
        "backward-of-a-module",
    ),  # of the weight that makes the values, and of the module above those that are off
)
def values_of_the_last_block_detached(run: Run) -> None:
    """Values of the last block's attention are detached: their projection learns nothing, and what is below less."""
    model: Any = run.trainer.policy.model
    model.model.layers[-1].self_attn.v_proj.register_forward_hook(lambda _, __, out: out.detach())
