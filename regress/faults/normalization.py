"""Faults in the weights of tokens: denominators and aggregation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from regress.engine import trainer
from regress.engine.batch import LossTokens
from regress.engine.step import weigh
from regress.faults.fault import Shown, fault
from regress.faults.patch import Patch
from regress.grpo.objective import Objective


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


# @@new
