"""A broken rule: which, where, and what shows it."""

from __future__ import annotations

from dataclasses import dataclass

CHECKS = {
    "finite": "losses, log-probs, advantages, gradients and parameters are finite",
    "on_policy": "the ratio is 1 where the old log-probs belong to the weights that are trained",
    "group_sums": "advantages of a group add up to 0",
    "shares": "every sample counts once in an update, with the weight of the others",
    "sampler": "log-probs of the sampler are those of the trainer, but for rounding",
    "replicas": "ranks that hold the same parameter hold the same bytes",
}
"""Name of a check, as `guard(checks=...)` takes it, and its rule."""


@dataclass(frozen=True)
class Violation:
    """A rule that does not hold.

    Attributes:
        check: name of the rule, of `CHECKS`.
        step: update, counted from 0 by the steps of the optimizer.
        rank: process that found it.
        message: one sentence: what is wrong, where, and its cause if that is proven.
    """

    check: str
    step: int
    rank: int
    message: str

    def __str__(self) -> str:
        return f"step {self.step}, rank {self.rank}: {self.message} (rule {self.check}: {CHECKS[self.check]})"
