"""Faults of the weights that a sampler receives, and of those that old log-probs are computed with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from regress.engine.adapters.parameters import trained_parameters
from regress.engine.local import local
from regress.engine.trainer import Trainer
from regress.parallel.policy import ParallelPolicy
from tests.faults.fault import fault
from tests.faults.patch import Patch

SAMPLED_FROM = ("sampler-weights", "sampler-distribution", "sampler")
"""Rules that name the weights of the sampler."""


@fault(
    category="P",
    fresh=True,
    source="Megatron PR#6920: shards that are not gathered for the engine that samples",
    cases=("rollout",),
    variants=("rollout-fsdp2-packed",),
    first="trajectory",
    steps=None,
    rules=SAMPLED_FROM,
)
def only_own_shards_reach_the_sampler(patch: Patch) -> None:
    """The sampler of a rank receives the rank's own shards; the others stay as they were at the beginning."""
    right: Any = ParallelPolicy._refresh

    def wrong(self: Any) -> None:
        known = self._world
        self._world = SimpleNamespace(gather=lambda own: [own])
        try:
            right(self)
        finally:
            self._world = known

    patch.setattr(ParallelPolicy, "_refresh", wrong)


@fault(
    category="P",
    fresh=True,
    source="verl#7495: a synchronization of matrices alone",
    cases=("rollout",),
    variants=("rollout-tp2",),
    first="sampler_log_probs",  # norms moved little: the same tokens are drawn, with other log-probs
    steps=None,
    rules=("sampler-not-updated", "sampler-log-probs"),
)
def norms_not_sent_to_the_sampler(patch: Patch) -> None:
    """The sampler receives matrices; the weights of its norms stay as they were at the beginning."""
    right: Any = ParallelPolicy._refresh

    @torch.no_grad()
    def wrong(self: Any) -> None:
        whole = dict(trained_parameters(self._whole))
        kept = {name: values.clone() for name, values in whole.items() if values.dim() == 1}
        right(self)
        for name, values in kept.items():
            whole[name].copy_(values)

    patch.setattr(ParallelPolicy, "_refresh", wrong)


@fault(
    category="P",
    kind="precision",
    fresh=True,
    source="TRL#5312: log-probs of a copy of the policy in the dtype of the engine that samples",
    cases=("cispo",),
    variants=("packed-mbs3",),
    first="old_log_probs old_log_probs",
    rules=("old-log-probs", "precision"),
)
def old_log_probs_of_weights_in_bfloat16(patch: Patch) -> None:
    """Old log-probs are computed with weights that are rounded to half precision, as they were sent."""
    right: Any = Trainer._collected

    @torch.no_grad()
    def wrong(self: Trainer, source: Any, *rest: Any) -> Tensor:
        if source is not self.policy:
            found: Tensor = right(self, source, *rest)
            return found
        kept = [(local(p), local(p).clone()) for _, p in self.policy.named_parameters()]
        for values, known in kept:
            values.copy_(known.bfloat16())
        try:
            found = right(self, source, *rest)
        finally:
            for values, known in kept:
                values.copy_(known)
        return found

    patch.setattr(Trainer, "_collected", wrong)
