"""Faults of runs that go on inside of a step, and of copies of the weights that others compute with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regress.dump.taps import receiving
from regress.engine.checkpoint import resume
from regress.engine.checkpoint.unfinished import restored
from regress.engine.local import local
from regress.engine.trainer import MiniBatch, Trainer, UnfinishedStep
from regress.parallel.policy import ParallelPolicy
from tests.faults.fault import fault
from tests.faults.patch import Patch


@fault(
    category="N",
    fresh=True,
    source="prime-rl PR#1035: the place in the data is not in the checkpoint",
    cases=("dapo",),
    variants=("resume-at3",),
    first="coverage",
    steps=None,
    rules=(
        "batch-left-out",
        "batch-twice",
        "other-samples",
    ),  # the first mini-batch is trained on three times, and the second once
)
def epoch_begins_anew_behind_a_checkpoint(patch: Patch) -> None:
    """Updates that were made are counted, and mini-batches are counted from the first one again."""
    update: Any = Trainer._update
    right: Any = Trainer._train_step
    made_before = [0]

    def noted(self: Trainer, work: UnfinishedStep, *rest: Any) -> None:
        made_before[0] = len(work.outcomes)
        update(self, work, *rest)

    def wrong(self: Trainer, mini: MiniBatch) -> Any:
        work = self.unfinished
        assert work is not None
        number = len(work.outcomes) - made_before[0]
        return right(self, work.minis[number % len(work.minis)])

    patch.setattr(Trainer, "_update", noted)
    patch.setattr(Trainer, "_train_step", wrong)


@fault(
    category="N",
    fresh=True,
    source="old log-probs that a resumed step computes anew, since no checkpoint holds them",
    cases=("cispo",),
    variants=("resume-at3-dp2-to-tp2",),
    first="old_log_probs",
    steps=None,
    rules=("old-is-current", "old-log-probs", "on-policy-ratio"),  # the weights are those of the next pass
)
def old_log_probs_of_the_resumed_policy(patch: Patch) -> None:
    """Old log-probs of an unfinished step are computed by the policy as it comes out of the checkpoint."""
    right: Any = restored

    def wrong(trainer: Trainer, *rest: Any) -> UnfinishedStep:
        work: UnfinishedStep = right(trainer, *rest)
        with receiving(None):
            work.minis[:] = [trainer._recorded(mini) for mini in work.minis]
        return work

    patch.setattr(resume, "restored", wrong)


@fault(
    category="P",
    fresh=True,
    source="Megatron-Bridge: halves of a fused projection in another order",
    cases=("rollout",),
    variants=("rollout-pp2",),
    first="trajectory",
    steps=None,
    rules=(
        "sampler-distribution",
        "sampler-weights",
    ),  # both name the sampler's weights; it has not received those of the trainer as they are
)
def gate_and_up_exchanged_for_the_sampler(patch: Patch) -> None:
    """Stages are put together for the sampler with the gate of an MLP in the place of its other input, and back."""
    right: Any = ParallelPolicy._refresh

    @torch.no_grad()
    def wrong(self: ParallelPolicy) -> None:
        right(self)
        for module in self._whole.modules():
            if hasattr(module, "gate_proj"):
                own: Any = module
                gate, up = own.gate_proj.weight, own.up_proj.weight
                before = gate.clone()
                gate.copy_(up)
                up.copy_(before)

    patch.setattr(ParallelPolicy, "_refresh", wrong)


@fault(
    category="P",
    fresh=True,
    source="TRL#5312: a copy of the policy for scoring that wakes up with its first weights",
    cases=("cispo",),
    variants=("packed-mbs3",),
    first="old_log_probs old_log_probs",
    steps=None,
    rules=("old-log-probs",),  # names other weights
)
def old_log_probs_of_a_copy_left_behind(patch: Patch) -> None:
    """Old log-probs are computed by a copy of the policy that never learns of its updates."""
    right: Any = Trainer._collected
    kept: dict[str, Tensor] = {}

    @torch.no_grad()
    def wrong(self: Trainer, source: Any, *rest: Any) -> Tensor:
        if source is not self.policy:
            found: Tensor = right(self, source, *rest)
            return found
        parts = {name: local(parameter.detach()) for name, parameter in self.policy.named_parameters()}
        now = {name: part.clone() for name, part in parts.items()}
        for name, part in parts.items():
            part.copy_(kept.setdefault(name, now[name]))
        found = right(self, source, *rest)
        for name, part in parts.items():
            part.copy_(now[name])
        return found

    patch.setattr(Trainer, "_collected", wrong)
