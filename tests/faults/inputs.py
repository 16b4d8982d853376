"""Faults in the model's inputs and masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from regress.dump.trajectory import Trajectory
from regress.engine import attention, policy, recurrent
from regress.engine.attention import VarlenSegments, visible
from regress.engine.batch import Microbatch, TokenBatch
from regress.engine.policy import LocalPolicy
from regress.engine.trainer import Trainer
from regress.layout import RankLayout, TokenLayout
from tests.faults.fault import Shown, fault
from tests.faults.patch import Patch


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
    rules=("positions-not-passed", "position-embedding"),
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
    rules=("padding-seen", "packed-leak"),
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
    category="G",
    source="transformers#44717, slime PR#1686, NeMo-Automodel#2131",
    first="activations model.layers.0",
    place="step0/rank0/micro0",
    cases=("hybrid",),
    variants=("packed",),
    tokens="behind another",
    probe="log_probs",
    rules=("state-across-samples",),
    silent={
        "hybrid/base": "nothing lies before a right padded sample",
        "hybrid/left-mbs3": "padding adds nothing to a state: its embedding is zero, and no layer before it has a bias",
        "dense": "attention alone carries no state",
    },
)
def state_handed_on(patch: Patch) -> None:
    """Layers of linear attention run over the whole row, as without ``cu_seqlens``: attention keeps samples apart."""
    layer = recurrent.SampleBySample
    apart: Any = layer.forward
    patch.setattr(layer, "forward", lambda self, *args, varlen=None, **named: apart(self, *args, **named))


@fault(
    category="Q",
    source="UniRL PR#409, NeMo-RL PR#2176",
    first="batch_inputs response_mask",
    place="step0/rank0/micro0",
    cases=("tools",),
    rules=("tool-tokens",),
    calibration=True,
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


def projected(patch: Patch, change: Callable[[Microbatch], Microbatch]) -> None:
    """Change every microbatch that is laid out."""
    right: Any = TokenBatch._project
    patch.setattr(TokenBatch, "_project", lambda self, *args: change(right(self, *args)))


def masks(patch: Patch, change: Callable[[Trajectory], list[int]]) -> None:
    """Train on the tokens that ``change`` tells of a sample."""
    patch.setattr(Trainer, "loss_masks", lambda _, samples: [change(sample) for sample in samples])


@fault(
    category="G",
    source="fairseq-style positions that begin at 1",
    first="batch_inputs position_ids",
    cases=("gpt2",),
    rules=("position-offset",),
)
def positions_from_one(patch: Patch) -> None:
    """Position ids begin at 1."""
    projected(patch, lambda micro: replace(micro, position_ids=micro.position_ids + 1))


@fault(
    category="Q",
    source="a mask of the response that begins with the prompt",
    first="batch_inputs response_mask",
    rules=("prompt-tokens",),
)
def prompt_tokens_in_the_loss(patch: Patch) -> None:
    """All tokens but the first are trained on."""
    masks(patch, lambda sample: [0] + [1] * (len(sample.tokens) - 1))


@fault(category="Q", source="slime#1490", first="batch_inputs response_mask", rules=("last-token-masked",))
def stop_token_not_in_the_loss(patch: Patch) -> None:
    """The last token of a sample is masked, so that it never learns to stop."""
    masks(patch, lambda sample: [*sample.loss_mask[:-1], 0])


@fault(
    category="Q",
    source="DAPO's overlong filter that is not applied",
    first="batch_inputs response_mask",
    cases=("dapo",),
    silent={"dense": "truncated completions are trained on"},
    # loss-mask: it names truncated completions
    rules=("loss-mask",),
)
def truncated_completions_in_the_loss(patch: Patch) -> None:
    """Completions that were cut off are trained on."""
    masks(patch, lambda sample: sample.loss_mask)


@fault(category="Q", source="TRL#5224, slime PR#117", first="batch_inputs input_ids", rules=("other-tokens",))
def tokens_encoded_again(patch: Patch) -> None:
    """Decoding and encoding again gives another id for the most frequent token."""

    def wrong(micro: Microbatch) -> Microbatch:
        ids = micro.input_ids
        often = ids[torch.from_numpy(micro.layout.attention_mask)].mode().values
        return replace(micro, input_ids=torch.where(ids == often, ids + 1, ids))

    projected(patch, wrong)


@fault(
    category="G",
    source="sliding_window of another configuration",
    first="activations model.layers.0",
    rules=("module", "long-context"),
)
def window_of_four(patch: Patch) -> None:
    """Tokens see no more than the four last ones."""
    right: Any = attention.block_causal_mask

    def wrong(layout: TokenLayout, *args: Any) -> Tensor:
        band = torch.ones(layout.shape[1], layout.shape[1], dtype=torch.bool).triu(-3)
        return right(layout, *args) & band

    patch.setattr(policy, "block_causal_mask", wrong)


@fault(
    category="G", source="a mask that is off by one", first="activations model.layers.0", rules=("module",)
)
def next_token_seen(patch: Patch) -> None:
    """A token sees the one after it."""

    def wrong(layout: TokenLayout, *_: Any) -> Tensor:
        columns = torch.arange(layout.shape[1])
        right = visible(layout, columns, columns)
        samples = torch.from_numpy(layout.sample_ids)
        after = (columns[None, :] == columns[:, None] + 1) & (samples[:, :, None] == samples[:, None, :])
        return right | (after & (samples[:, :, None] >= 0))[:, None]

    patch.setattr(policy, "block_causal_mask", wrong)


# @@new
