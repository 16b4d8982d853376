"""Faults in the weights of tokens: denominators and aggregation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regress.engine import trainer
from regress.engine.batch import LossTokens
from regress.engine.step import weigh
from regress.grpo.objective import Objective
from tests.faults.fault import Shown, fault
from tests.faults.patch import Patch


@fault(
    category="A",
    source="transformers PR#34191, open-instruct PR#1161",
    first="weights weights",
    place="step0/rank0/micro0",
    variants=("longest-first",),
    tokens="all",
    rules=("mean-of-means",),
    calibration=True,
    also=(Shown("dapo", "mbs4", "weights weights", place="step0/update0/rank0/micro0", tokens="all"),),
    silent={"dense/mbs4": "a mean over samples, of which every microbatch has four"},
)
def mean_of_means(patch: Patch) -> None:
    """The loss is the mean of each microbatch's mean."""
    right: Any = weigh

    def wrong(tokens: LossTokens, parts: Sequence[Any], objective: Objective, **rest: Any) -> Any:
        return right(tokens, parts, replace(objective, denominator_scope="microbatch"), **rest)

    patch.setattr(trainer, "weigh", wrong)


@fault(
    category="A",
    source="TRL issue#6369: a denominator of other tokens",
    first="weights weights",
    rules=("weights-denominator",),
    small=True,
    calibration=True,
    tokens="all",
)
def last_token_not_counted(patch: Patch) -> None:
    """The denominator is one token short."""
    right: Any = weigh

    def wrong(*args: Any, **rest: Any) -> Any:
        weights = right(*args, **rest)
        return weights * (len(weights) / (len(weights) - 1))

    patch.setattr(trainer, "weigh", wrong)


def weighed(patch: Patch, change: Callable[..., Tensor]) -> None:
    """Replace the weights of the loss tokens by ``change(right, tokens, partition, objective, **rest)``."""
    right: Any = weigh
    patch.setattr(trainer, "weigh", lambda *args, **rest: change(right, *args, **rest))


@fault(
    category="A", source="verl#2776", first="weights weights", tokens="all", rules=("weights-denominator",)
)
def token_mean_for_sequence_mean(patch: Patch) -> None:
    """The mean is over all tokens of the batch, in place of one over samples of those over their tokens."""
    weighed(
        patch,
        lambda right, tokens, parts, objective, **rest: right(
            tokens, parts, replace(objective, aggregation="token-mean"), **rest
        ),
    )


@fault(
    category="A",
    source="verl#5625, PR#5641",
    first="weights weights",
    cases=("dapo",),
    tokens="all",
    rules=("mean-of-means", "weights-denominator"),
)
def token_mean_times_share_of_samples(patch: Patch) -> None:
    """A mean over the tokens of each microbatch, times its share of the samples."""

    def wrong(
        right: Any, tokens: LossTokens, parts: Sequence[Sequence[int]], *args: Any, **rest: Any
    ) -> Tensor:
        weights = right(tokens, parts, *args, **rest)
        for members in parts:
            here = torch.isin(tokens.sequence, torch.tensor(members))
            weights[here] = len(members) / sum(map(len, parts)) / max(int(here.sum()), 1)
        return weights

    weighed(patch, wrong)


@fault(
    category="A",
    source="transformers PR#39659",
    first="weights weights",
    variants=("reversed",),
    rules=("mean-of-means", "weights-denominator"),
    silent={"dense/mbs4": "twelve samples fill three microbatches of four"},
)
def last_window_divided_by_all(patch: Patch) -> None:
    """The last microbatch, which is not full, is divided by the samples of a full one."""

    def wrong(
        right: Any, tokens: LossTokens, parts: Sequence[Sequence[int]], *args: Any, **rest: Any
    ) -> Tensor:
        weights = right(tokens, parts, *args, **rest)
        most = max(map(len, parts))
        for members in parts:
            weights[torch.isin(tokens.sequence, torch.tensor(members))] *= len(members) / most
        return weights

    weighed(patch, wrong)


@fault(
    category="A",
    source="TRL issue#6369, PR#6439",
    first="weights weights",
    cases=("dapo",),
    rules=("weights-denominator",),
    silent={"dense": "no completion is masked"},
)
def masked_completions_counted(patch: Patch) -> None:
    """The denominator counts the tokens of completions that are masked because they were truncated."""

    def wrong(
        right: Any, tokens: LossTokens, *args: Any, completion_lengths: Sequence[int], **rest: Any
    ) -> Tensor:
        weights = right(tokens, *args, completion_lengths=completion_lengths, **rest)
        return weights * len(tokens) / sum(completion_lengths)

    weighed(patch, wrong)


@fault(
    category="A",
    source="TRL#5619, PR#6024",
    first="weights weights",
    tokens="all",
    rules=("weights-denominator", "weights-world-size"),
    blind=("cosine 0.99", "allclose", "mean 1e-3"),
)
def loss_of_half_the_steps(patch: Patch) -> None:
    """The loss is scaled for two accumulation steps a generation, and there is one."""
    weighed(patch, lambda right, *args, **rest: 2.0 * right(*args, **rest))


@fault(
    category="A",
    source="Dr. GRPO with the longest completion as its constant",
    first="weights weights",
    cases=("dr_grpo",),
    rules=("weights-denominator", "mean-of-means"),
)
def length_of_the_longest(patch: Patch) -> None:
    """The constant that divides is the length of the longest completion of a microbatch."""
    weighed(
        patch,
        lambda right, tokens, parts, objective, **rest: right(
            tokens, parts, replace(objective, norm_rule="longest"), **rest
        ),
    )


@fault(
    category="A",
    source="GRPO without a mean over samples",
    first="weights weights",
    tokens="all",
    rules=("weights-denominator",),
)
def sum_over_tokens(patch: Patch) -> None:
    """Nothing divides: a sum over all tokens."""
    weighed(
        patch,
        lambda right, tokens, parts, objective, **rest: right(
            tokens, parts, replace(objective, aggregation="token-sum"), **rest
        ),
    )


# @@new
