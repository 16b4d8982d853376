"""Faults of bounds: of the weights of CISPO, of weights for the sampler, and of the norm of gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from regress.engine.policy import LocalPolicy
from regress.grpo import corrections, policy_losses
from regress.grpo.fields import ObjectiveFields
from regress.grpo.policy_losses import PolicyInputs
from tests.faults.fault import fault
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import MOMENTS

LOWER = 0.9
"""Lower bound of a symmetric clip range around 1, the upper one being that of the golden case."""


@fault(
    category="K",
    fresh=True,
    source="CISPO with the clip range of PPO: the lower bound is not switched off",
    cases=("cispo",),
    variants=("packed-mbs3",),
    first="policy_loss policy_loss",
    update=1,
    rules=("clip-bound", "clip-range", "policy-loss", "inputs-hold"),
)
def weights_bounded_from_below(patch: Patch) -> None:
    """The weight of a token is at least 0.9, and should have no lower bound."""

    def wrong(t: PolicyInputs, o: ObjectiveFields) -> Tensor:
        low, high = o.clip_range
        return -t.ratio.clamp(max(low, LOWER), high).detach() * t.advantages * t.log_probs

    patch.setattr(policy_losses, "cispo", wrong)


@fault(
    category="K",
    fresh=True,
    source="a mask (IcePop) in place of truncated importance sampling",
    cases=("cispo",),
    variants=("reversed",),
    first="sampler_weights sampler_weights",
    rules=("sampler-mismatch", "inputs-hold"),  # names the other way round of truncation and mask
)
def weights_beyond_their_bound_dropped(patch: Patch) -> None:
    """Tokens whose weight for the sampler exceeds its bound are left out, and should count by the bound."""
    right: Any = corrections._bounded_weights

    def wrong(old: Tensor, sampler: Tensor, samples: Any, objective: Any) -> Tensor:
        level, _, _ = objective.sampler_correction.partition("_")
        found: Tensor = right(old, sampler, samples, replace(objective, sampler_correction=f"{level}_mask"))
        return found

    patch.setattr(corrections, "_bounded_weights", wrong)


@fault(
    category="L",
    fresh=True,
    source="a limit that is meant for the gradient of one rank, under a sum over ranks",
    cases=("tied",),
    variants=("dp2-pp2-mbs2",),
    first="optimizer",
    names=MOMENTS,
    rules=("clip-of-gradients", "state-of-a-rank-unclipped", "inputs-hold"),
)
def limit_of_the_norm_shared_by_ranks(patch: Patch) -> None:
    """The norm at which gradients are clipped is divided by the number of ranks."""
    right: Any = LocalPolicy.clip_grad_norm

    def wrong(self: LocalPolicy, limit: float | None) -> Tensor:
        found: Tensor = right(self, None if limit is None else limit / dist.get_world_size())
        return found

    patch.setattr(LocalPolicy, "clip_grad_norm", wrong)


@fault(
    category="L",
    fresh=True,
    source="DeepSpeed#8475: a group of parameters that the norm does not go through",
    cases=("gpt2",),
    variants=("left-mbs3",),
    first="grad_norm grad_norm",
    rules=("norm-of-a-part", "norm", "inputs-hold"),
)
def embeddings_left_out_of_the_norm(patch: Patch) -> None:
    """The norm is that of all gradients but those of the embeddings of tokens and positions."""
    right: Any = LocalPolicy._total_norm

    def wrong(self: LocalPolicy, norms: Mapping[str, Tensor]) -> Tensor:
        found: Tensor = right(
            self, {n: norm for n, norm in norms.items() if "wte" not in n and "wpe" not in n}
        )
        return found

    patch.setattr(LocalPolicy, "_total_norm", wrong)
