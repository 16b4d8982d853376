"""Refactorings of masks, heads, buffers of gradients, and what a checkpoint restores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.optim import Optimizer

from regress.dump.record import Record
from regress.dump.trajectory import Trajectory
from regress.engine import attention, policy
from regress.engine.attention import block_causal_mask, visible
from regress.engine.checkpoint import resume
from regress.engine.checkpoint.optimizer import load_whole
from regress.engine.policy import LocalPolicy
from regress.engine.trainer import Trainer
from regress.layout import TokenLayout
from regress.parallel import all_gather, ulysses
from regress.parallel.policy import ParallelPolicy
from tests.faults.fault import fault
from tests.faults.patch import Patch

WIDE = ("float64", "float32")
LONGEST = 24
"""Tokens that no sample of the golden cases used here exceeds."""


@fault(
    category="M",
    kind="harmless",
    fresh=True,
    cases=("dapo",),
    variants=("mbs4", "dp2"),
    precisions=WIDE,
)
def gradients_zeroed_in_place(patch: Patch) -> None:
    """Gradients are filled with zeros between updates, and keep their memory."""

    def zeroed(self: LocalPolicy) -> None:
        self.model.zero_grad(set_to_none=False)

    def on_ranks(self: ParallelPolicy) -> None:
        for stage in self._stages.models:
            stage.zero_grad(set_to_none=False)

    patch.setattr(LocalPolicy, "zero_grad", zeroed)
    patch.setattr(ParallelPolicy, "zero_grad", on_ranks)


@fault(
    category="G",
    kind="harmless",
    fresh=True,
    cases=("dense", "gpt2"),
    variants=("eager", "packed-eager"),
    precisions=WIDE,
)
def mask_of_minus_ten_thousand(patch: Patch) -> None:
    """An additive mask holds -10000 in place of the least number: its exponential is 0 as well."""
    right: Any = block_causal_mask

    def other(*args: Any) -> Tensor:
        mask: Tensor = right(*args)
        return mask.clamp(min=-1e4) if mask.is_floating_point() else mask

    patch.setattr(policy, "block_causal_mask", other)


@fault(
    category="T",
    kind="harmless",
    fresh=True,
    cases=("dense", "gpt2"),
    variants=("packed-mbs3", "left-mbs3"),
    precisions=WIDE,
)
def window_longer_than_any_sample(patch: Patch) -> None:
    """Tokens see no more than the 24 last ones of their row, and every sample is shorter."""
    right: Any = visible

    def other(layout: TokenLayout, queries: Tensor, keys: Tensor) -> Tensor:
        found: Tensor = right(layout, queries, keys)
        return found & (queries[:, None] - keys < LONGEST)

    patch.setattr(attention, "visible", other)


@fault(
    category="D",
    kind="harmless",
    fresh=True,
    cases=("dense",),
    variants=("cp2", "cp2-gather"),
    precisions=WIDE,
)
def heads_of_keys_repeated_for_their_queries(patch: Patch) -> None:
    """Keys and values are repeated for the queries that share them, and attention has as many heads of each."""

    def other(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
        times = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(times, dim=1) for tensor in (key, value))
        return scaled_dot_product_attention(query, key, value, mask, scale=scaling)

    patch.setattr(ulysses, "attend", other)
    patch.setattr(all_gather, "attend", other)


@fault(
    category="N",
    kind="harmless",
    fresh=True,
    cases=("dense", "tied"),
    variants=("resume-at2",),
    steps=None,
)
def state_restored_from_the_last_tensor(patch: Patch) -> None:
    """The state of the optimizer is read from a checkpoint in the reverse order of its tensors."""
    right: Any = load_whole

    def other(optimizer: Optimizer, owner: LocalPolicy, record: Record, *rest: Any) -> None:
        turned = dict(reversed(record.tensors.items()))
        right(optimizer, owner, replace(record, tensors=turned), *rest)

    patch.setattr(resume, "load_whole", other)


@fault(
    category="Q",
    kind="harmless",
    fresh=True,
    cases=("tools",),
    variants=("mbs4", "dp2-packed-budget48"),
    precisions=WIDE,
)
def masks_of_booleans(patch: Patch) -> None:
    """Loss masks are lists of True and False."""
    right: Any = Trainer.loss_masks

    def other(self: Trainer, samples: Sequence[Trajectory]) -> list[list[bool]]:
        return [[bool(value) for value in mask] for mask in right(self, samples)]

    patch.setattr(Trainer, "loss_masks", other)
