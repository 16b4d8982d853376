"""Faults of ratios, smoothing and limits: what holds an update near the policy that it began with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regress.dump.taps import receiving
from regress.engine import policy
from regress.engine.build import Run
from regress.engine.local import local
from regress.engine.policy import LocalPolicy
from regress.engine.trainer import MiniBatch, Trainer
from regress.grpo import losses
from regress.grpo.logprobs import token_log_probs
from regress.grpo.ratios import importance_ratio
from tests.faults.fault import fault
from tests.faults.optimizer import EMBEDDING
from tests.faults.patch import Patch
from tests.faults.rounding import rounded

SMOOTHING = 0.1


@fault(
    category="H",
    fresh=True,
    source="Megatron#737: label smoothing",
    variants=("chunked",),
    first="log_probs log_probs",
    rules=("log-softmax",),
)
def labels_smoothed(patch: Patch) -> None:
    """A tenth of a token's log-prob is the mean log-prob of the vocabulary."""
    right: Any = token_log_probs

    def wrong(logits: Tensor, targets: Tensor, *, temperature: float = 1.0, **rest: Any) -> Any:
        found = right(logits, targets, temperature=temperature, **rest)
        mean = (logits / temperature).log_softmax(-1).mean(-1)
        return replace(found, log_probs=(1 - SMOOTHING) * found.log_probs + SMOOTHING * mean)

    patch.setattr(policy, "token_log_probs", wrong)


@fault(
    category="K",
    fresh=True,
    source="ms-swift PR#6548: a ratio that is broadcast over a packed row",
    cases=("gspo",),
    variants=("dp2-packed-mbs3",),
    first="ratio prob_ratio",
    ranks=(0, 1),
    rules=("ratio", "ratio-level"),
)
def ratio_of_the_packed_row(patch: Patch) -> None:
    """All samples of a packed row share one ratio: that of the mean over all its tokens."""
    right: Any = importance_ratio

    def wrong(new: Tensor, old: Tensor, sequence: Tensor, *rest: Any) -> Tensor:
        return right(new, old, torch.zeros_like(sequence), *rest)

    patch.setattr(losses, "importance_ratio", wrong)


@fault(
    category="K",
    fresh=True,
    source="old log-probs that every epoch computes anew",
    cases=("dapo",),
    first="old_log_probs old_log_probs",
    update=2,
    rules=("old-is-current", "old-log-probs"),
)
def old_log_probs_of_each_epoch(patch: Patch) -> None:
    """When the second epoch begins, the log-probs of the rollout are computed again by the policy of that time."""
    right: Any = Trainer._train_step
    known: dict[int, Tensor] = {}

    def wrong(self: Trainer, mini: MiniBatch) -> Any:
        work = self.unfinished
        assert work is not None
        made = len(work.outcomes)
        if made % len(work.minis) == 0:
            known.clear()
            for one in work.minis if made else ():
                with receiving(None):
                    known[id(one)] = self._collected(self.policy, one.microbatches, len(one.tokens))
        if id(mini) in known:
            mini = replace(mini, tokens=replace(mini.tokens, old_log_probs=known[id(mini)]))
        return right(self, mini)

    patch.setattr(Trainer, "_train_step", wrong)


def _scaled_by(patch: Patch, factor: Any) -> None:
    """Multiply gradients by ``factor(limit, norm)``; the norm is right where it is reported."""
    right: Any = LocalPolicy.clip_grad_norm

    def wrong(self: LocalPolicy, limit: float | None) -> Tensor:
        norm: Tensor = right(self, None)
        for _, parameter in self.named_parameters():
            if limit is not None and parameter.grad is not None:
                local(parameter.grad).mul_(factor(limit, norm))
        return norm

    patch.setattr(LocalPolicy, "clip_grad_norm", wrong)


@fault(
    category="L",
    fresh=True,
    source="a clip by max_norm / norm without its limit of 1",
    first=f"optimizer {EMBEDDING}/exp_avg",
    rules=("clip-of-gradients", "state-of-a-rank-unclipped"),
)
def gradients_raised_to_the_limit(patch: Patch) -> None:
    """A gradient below the limit is scaled up to it, too."""
    _scaled_by(patch, lambda limit, norm: limit / (norm + 1e-6))


@fault(
    category="O",
    kind="precision",
    fresh=True,
    source="a factor of clipping in the dtype of half-precision gradients",
    cases=("tied",),
    first=f"optimizer {EMBEDDING}/exp_avg",
    rules=("clip-of-gradients", "state-of-a-rank-unclipped", "precision"),
)
def clip_factor_in_bfloat16(patch: Patch) -> None:
    """The factor that clips gradients is rounded to half precision."""
    _scaled_by(patch, lambda limit, norm: rounded((limit / (norm + 1e-6)).clamp(max=1.0)))


@fault(
    category="L",
    fresh=True,
    source="Megatron: shared parameters that the norm counts on first and last stage",
    cases=("tied",),
    variants=("pp2-mbs4",),
    first="grad_norm",
    ranks=(0, 1),
    rules=("norm-of-a-part",),  # names what several ranks hold, and is counted more than once
)
def tied_weight_in_the_norm_of_both_stages(run: Run) -> None:
    """The gradient of the tied weight enters the norm once on each of the stages that hold it."""
    model: Any = run.trainer.policy
    assert model._stages.tied
    model._owned = model._owned | set(model._stages.tied)
