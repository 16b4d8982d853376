"""Faults of single samples, passes and columns: a last token, a first microbatch, and half of a head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.models.llama import modeling_llama

from regress.dump.trajectory import Trajectory
from regress.engine.batch import Microbatch
from regress.engine.policy import LocalPolicy
from regress.engine.trainer import Trainer
from tests.faults.fault import fault
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import AFTER_ATTENTION


@fault(
    category="Q",
    fresh=True,
    source="a trainer that drops the last token of each completion as its end token, also where there is none",
    variants=("dp2-packed-budget48",),
    first="batch_inputs response_mask",
    rules=("last-token-masked", "mask-shifted", "loss-mask"),  # the second one names an end one token off
)
def last_token_of_truncated_completions_masked(patch: Patch) -> None:
    """The last token of completions that were cut off is not trained on, as if it were an end token."""
    right: Any = Trainer.loss_masks

    def wrong(self: Trainer, samples: Sequence[Trajectory]) -> list[list[int]]:
        masks: list[list[int]] = right(self, samples)
        return [
            [*mask[:-1], 0] if one.finish_reason == "length" else mask
            for one, mask in zip(samples, masks, strict=True)
        ]

    patch.setattr(Trainer, "loss_masks", wrong)


@fault(
    category="S",
    fresh=True,
    source="an adapter that is switched off for the reference, and on again when the next pass has begun",
    cases=("lora",),
    first="activations model.layers.0",
    names=AFTER_ATTENTION,
    place="step0/rank0/micro0",
    rules=("module", "inputs-hold"),
)
def adapters_off_in_the_first_microbatch(patch: Patch) -> None:
    """The first microbatch of an update is computed without adapters, and all others with them."""
    passes: Any = LocalPolicy.forward_backward
    right: Any = LocalPolicy._run
    first: list[Microbatch] = []

    def begun(self: LocalPolicy, microbatches: Sequence[Microbatch], *rest: Any) -> Any:
        first[:] = microbatches[:1]
        return passes(self, microbatches, *rest)

    def wrong(self: LocalPolicy, model: Any, micro: Microbatch, *rest: Any) -> Tensor:
        off = torch.is_grad_enabled() and bool(first) and micro is first[0]
        layers: list[Any] = [
            one for one in model.modules() if hasattr(one, "lora_A") and hasattr(one, "scaling")
        ]
        assert layers
        kept = [layer.scaling for layer in layers]
        for layer in layers if off else ():
            layer.scaling = dict.fromkeys(layer.scaling, 0.0)
        try:
            found: Tensor = right(self, model, micro, *rest)
            return found
        finally:
            for layer, known in zip(layers, kept, strict=True):
                layer.scaling = known

    patch.setattr(LocalPolicy, "forward_backward", begun)
    patch.setattr(LocalPolicy, "_run", wrong)


@fault(
    category="T",
    fresh=True,
    source="partial_rotary_factor of another model's configuration",
    cases=("tied",),
    variants=("packed-mbs3",),
    first="activations model.layers.0",
    names=AFTER_ATTENTION,
    rules=("rotary", "module", "inputs-hold"),
)
def half_of_each_head_rotated(patch: Patch) -> None:
    """Positions rotate the first half of each head's columns, and leave the other half as it is."""
    right: Any = modeling_llama.apply_rotary_pos_emb

    def wrong(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        half = q.shape[-1] // 2
        angles = (torch.cat([one[..., : half // 2]] * 2, -1) for one in (cos, sin))
        query, key = right(q[..., :half], k[..., :half], *angles, *rest)
        return torch.cat([query, q[..., half:]], -1), torch.cat([key, k[..., half:]], -1)

    patch.setattr(modeling_llama, "apply_rotary_pos_emb", wrong)
