"""Faults in the model's inputs and masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from regress.engine import policy
from regress.engine.attention import VarlenSegments
from regress.engine.batch import Microbatch, TokenBatch
from regress.engine.policy import LocalPolicy
from regress.engine.trainer import Trainer
from regress.faults.fault import Shown, fault
from regress.faults.patch import Patch
from regress.layout import RankLayout, TokenLayout


@fault(
    category="G",
    source="LlamaFactory PR#7318",
    first="batch_inputs position_ids",
    place="step0/rank0/micro0",
    cases=("gpt2",),
    variants=("packed-dynamic",),
    tokens="behind another",
    probe="log_probs",
    rules=("position-columns",),
    calibration=True,
    blind=("loss 5 %",),
    silent={},
)
def columns_as_positions(patch: Patch) -> None:
    """Position ids count through the row, samples and padding alike, in the batch that is recorded."""
    project = TokenBatch._project

    def wrong(self: TokenBatch, place: RankLayout, *args: Any) -> Microbatch:
        micro = project(self, place, *args)
        layout = place.tokens
        columns = torch.arange(layout.shape[1]).expand(layout.shape)
        return replace(micro, position_ids=torch.where(torch.from_numpy(layout.attention_mask), columns, 0))

    patch.setattr(TokenBatch, "_project", wrong)


@fault(
    category="G",
    source="TRL#6800, OpenRLHF#217",
    first="activations transformer.wpe",
    place="step0/rank0/micro0",
    cases=("gpt2",),
    variants=("packed-dynamic",),
    tokens="behind another",
    probe="log_probs",
    rules=("positions-not-passed",),
    calibration=True,
    also=(
        Shown(
            "gpt2",
            "left",
            "activations transformer.wpe",
            place="step0/rank0/micro0",
            tokens="behind padding",
            probe="log_probs",
        ),
    ),
    silent={
        "dense/packed-dynamic": "rotary: only distances within a sample count",
        "dense/left": "rotary: only distances within a sample count",
    },
)
def positions_ignored(patch: Patch) -> None:
    """Position ids count through the row, but only in the model: the recorded batch is right."""
    run = LocalPolicy._run

    def wrong(self: LocalPolicy, model: PreTrainedModel, micro: Microbatch, *rest: Any) -> Tensor:
        columns = torch.arange(micro.layout.shape[1]).expand(micro.layout.shape)
        return run(self, model, replace(micro, position_ids=columns), *rest)

    patch.setattr(LocalPolicy, "_run", wrong)


@fault(
    category="G",
    source="TRL PR#2708: no attention mask in the forward pass of log-probs",
    first="activations model.layers.0",
    place="step0/rank0/micro0",
    variants=("left-mbs3",),
    tokens="behind padding",
    probe="log_probs",
    rules=("padding-seen",),
    small=True,
    calibration=True,
    also=(
        Shown(
            "dense",
            "packed-mbs3",
            "activations model.layers.0",
            place="step0/rank0/micro0",
            tokens="behind another",
            probe="log_probs",
        ),
    ),
    silent={"dense/base": "nothing lies before a right padded sample"},
)
def causal_only(patch: Patch) -> None:
    """The attention mask is the causal one alone."""

    def wrong(layout: TokenLayout, implementation: str, *_: Any) -> Tensor:
        assert implementation == "sdpa"
        rows, columns = layout.shape
        return torch.ones(rows, 1, columns, columns, dtype=torch.bool).tril()

    patch.setattr(policy, "block_causal_mask", wrong)


@fault(
    category="G",
    source="NeMo-RL#2105, maxtext#4476",
    first="activations model.layers.0",
    place="step0/rank0/micro0",
    variants=("varlen",),
    tokens="behind another",
    probe="log_probs",
    rules=("packed-leak",),
    calibration=True,
)
def one_segment(patch: Patch) -> None:
    """``cu_seqlens`` is dropped: a packed row is one sequence."""
    of = VarlenSegments.of

    def wrong(layout: TokenLayout, local_index: Tensor) -> VarlenSegments:
        right = of(layout, local_index)
        return VarlenSegments(right.index, (sum(right.lengths),))

    patch.setattr(VarlenSegments, "of", wrong)


@fault(
    category="Q",
    source="UniRL PR#409, NeMo-RL PR#2176",
    first="batch_inputs response_mask",
    place="step0/rank0/micro0",
    cases=("tools",),
    rules=("tool-tokens",),
    calibration=True,
    tokens="tools",
    silent={"dense": "no tool writes anything"},
)
def tool_tokens_in_the_loss(patch: Patch) -> None:
    """Everything after the prompt is trained on."""
    patch.setattr(
        Trainer,
        "loss_masks",
        lambda _, samples: [[0] * t.prompt_length + [1] * (len(t.tokens) - t.prompt_length) for t in samples],
    )


@fault(
    category="G",
    source="verl#2185, SkyRL PR#2096",
    first="ref_log_probs ref_log_probs",
    place="step0/rank0/micro0",
    variants=("reversed",),
    rules=("order-not-restored",),
    calibration=True,
    silent={"dense/base": "one microbatch in the given order"},
)
def order_not_restored(patch: Patch) -> None:
    """Values of reordered microbatches are laid end to end instead of back in their places."""

    def wrong(self: Trainer, source: LocalPolicy, micros: Sequence[Microbatch], count: int) -> Tensor:
        return torch.cat(source.log_probs(micros))

    patch.setattr(Trainer, "_collected", wrong)


# @@new
