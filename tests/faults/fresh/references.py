"""Faults of the reference and of the divergence from it, and of the log-probs that both are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regress.engine.batch import Microbatch
from regress.engine.build import Run
from regress.engine.local import local
from regress.engine.policy import LocalPolicy
from regress.engine.reference import Reference
from regress.errors import ReplayError
from regress.grpo import losses
from tests.faults.fault import fault
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import on_rank
from tests.faults.rounding import rounded


@fault(
    category="H",
    fresh=True,
    source="NeMo-RL PR#935: a temperature that one of two paths applies",
    cases=("dr_grpo",),
    variants=("packed-chunked-mbs4",),
    first="log_probs log_probs",
    rules=("temperature", "log-softmax"),
)
def incomplete_chunks_without_temperature(patch: Patch) -> None:
    """Chunks of tokens that are not full take a path of their own, which does not divide by the temperature."""
    right: Any = LocalPolicy._token_log_probs

    def wrong(self: LocalPolicy, logits: Tensor, targets: Tensor, entropy: Any) -> Any:
        known, size = self.temperature, self.log_prob_chunk_size
        if size is not None and len(targets) < size:
            self.temperature = 1.0
        try:
            return right(self, logits, targets, entropy)
        finally:
            self.temperature = known

    patch.setattr(LocalPolicy, "_token_log_probs", wrong)


@fault(
    category="H",
    fresh=True,
    source="ms-swift PR#8196, prime-rl PR#1525: a shift of the log-probs of one model alone",
    variants=("packed-dynamic",),
    first="ref_log_probs ref_log_probs",
    rules=("log-probs-shifted", "reference"),
)
def reference_rolled_within_packed_rows(patch: Patch) -> None:
    """Log-probs of the reference are rolled by one token within each packed row."""
    right: Any = Reference.log_probs

    def wrong(self: Reference, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        return [values.roll(1) for values in right(self, microbatches)]

    patch.setattr(Reference, "log_probs", wrong)


@fault(
    category="J",
    fresh=True,
    source="SkyRL PR#1345: a conversion of weights that knows one stage of the pipeline",
    variants=("pp2-1f1b-packed-mbs3",),
    first="ref_log_probs ref_log_probs",
    rules=("reference",),  # names other weights
)
@torch.no_grad()
def last_stage_of_the_reference_not_loaded(run: Run) -> None:
    """The reference has the policy's weights on the last stage of the pipeline, and its own on the first."""
    if run.trainer.reference is None:
        raise ReplayError("there is no reference")
    known = dict(run.trainer.policy.named_parameters())
    for name, ours in run.trainer.reference.parameters():
        if on_rank(1):
            local(ours).copy_(local(known[name]))


@fault(
    category="J",
    fresh=True,
    source="TRL: a callback that moves the reference on the main process",
    cases=("cispo_kl",),
    variants=("fsdp2",),
    first="ref_log_probs ref_log_probs",
    steps=None,
    rules=(
        "reference",
        "advantage-penalty",  # names the reference that the penalty compares
        "advantages",
    ),
)
def reference_moved_on_one_rank(patch: Patch) -> None:
    """Only the first rank moves its shards of the reference towards the policy."""
    right: Any = Reference.after_step

    def wrong(self: Reference, step: int) -> None:
        if on_rank(0):
            right(self, step)

    patch.setattr(Reference, "after_step", wrong)


@fault(
    category="J",
    fresh=True,
    source="a fused kernel that returns early for clipped tokens",
    variants=("packed-mbs3",),
    first="kl kl",
    rules=("kl",),  # names a mask on it
)
def divergence_left_out_at_the_clip(patch: Patch) -> None:
    """Tokens whose policy loss is clipped have no KL."""
    right: Any = losses._token_loss
    estimate: Any = losses._kl
    advantages: list[Tensor] = []

    def begun(log_probs: Tensor, given: Any, *rest: Any) -> Any:
        advantages[:] = [given.advantages]
        return right(log_probs, given, *rest)

    def wrong(log_probs: Tensor, reference: Tensor | None, ratio: Tensor, objective: Any) -> Tensor:
        found: Tensor = estimate(log_probs, reference, ratio, objective)
        low, high = objective.clip_range
        below, above = (ratio < low) & (advantages[0] < 0), (ratio > high) & (advantages[0] > 0)
        return found.masked_fill(below | above, 0.0)

    patch.setattr(losses, "_token_loss", begun)
    patch.setattr(losses, "_kl", wrong)


@fault(
    category="J",
    kind="precision",
    fresh=True,
    source="a divergence that is kept in the dtype of the model",
    variants=("chunked",),
    first="kl kl",
    rules=("rounded", "dtype", "precision"),
)
def divergence_kept_in_bfloat16(patch: Patch) -> None:
    """The estimate of the KL of each token is rounded to half precision."""
    right: Any = losses._kl
    patch.setattr(losses, "_kl", lambda *args: rounded(right(*args)))
