"""Faults of groups: a mean over them, and advantages of theirs that one rank limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regress.engine import trainer
from regress.engine.trainer import MiniBatch, Trainer
from regress.grpo.advantages import token_advantages
from tests.faults.fault import fault
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import on_rank


@fault(
    category="A",
    fresh=True,
    source="verl#2776: a token mean within each prompt, in place of one within each sample",
    variants=("dynamic",),
    first="weights weights",
    rules=("weights-denominator",),
)
def mean_over_groups_of_means_over_tokens(patch: Patch) -> None:
    """The mean is over all tokens of a group, and then over groups: long samples weigh more than short ones."""
    right: Any = Trainer._laid_out

    def wrong(self: Trainer, *args: Any) -> MiniBatch:
        found: MiniBatch = right(self, *args)
        tokens = found.tokens
        assert tokens.weights is not None
        numbers = {key: n for n, key in enumerate(dict.fromkeys(group for group, _ in found.batch.keys))}
        group = torch.tensor([numbers[key] for key, _ in found.batch.keys])[tokens.sequence]
        sizes = torch.bincount(group, minlength=len(numbers)).to(tokens.weights.dtype)
        weights = 1.0 / (len(numbers) * sizes[group])
        return replace(found, tokens=replace(tokens, weights=weights))

    patch.setattr(Trainer, "_laid_out", wrong)


@fault(
    category="I",
    fresh=True,
    source="a limit of advantages that one node still has in its configuration",
    variants=("dp2",),
    first="advantages",
    ranks=(1,),
    rules=(
        "advantage-groups",
        "one-sample",
    ),  # the first one names a limit; only one sample of that rank is beyond it
)
def advantages_limited_on_a_rank(patch: Patch) -> None:
    """One rank limits advantages to 1 in size."""
    right: Any = token_advantages

    def wrong(*args: Any, **rest: Any) -> Tensor:
        found: Tensor = right(*args, **rest)
        return found.clamp(-1.0, 1.0) if on_rank(1) else found

    patch.setattr(trainer, "token_advantages", wrong)
