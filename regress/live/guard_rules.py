"""Rules of `guard`, one of them that is broken, and arguments that are not valid, each refused by one sentence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from torch import distributed

from regress.errors import GuardError
from regress.live.sampler_mismatch import TOLERANCE

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


def chosen_checks(checks: Iterable[str] | None) -> tuple[str, ...]:
    """Return the names of the rules to check; raise `GuardError` for what is not a list of them."""
    if checks is None:
        return (*CHECKS,)
    if isinstance(checks, str) or not isinstance(checks, Iterable):
        raise GuardError(
            f"guard(checks={checks!r}) is not a list of rules: choose one of {', '.join(CHECKS)}"
        )
    chosen = (*checks,)
    for name in chosen:
        _known(name, CHECKS)
    return chosen


def refuse_options(
    action: Any, sampler_dtype: Any, centered: Any, group_size: Any, data_rank: Any, replica_group: Any
) -> None:
    """Raise `GuardError` for an option of another type, or out of its range; see `guard`."""
    if not isinstance(action, str) or action not in ("raise", "warn"):
        raise GuardError(f"guard(action={action!r}) is neither 'raise' nor 'warn'")
    if sampler_dtype is not None:
        _known(sampler_dtype, TOLERANCE)
    if not isinstance(centered, bool):
        raise GuardError(f"guard(centered={centered!r}) is neither True nor False")
    for name, value, least in (("group_size", group_size, 1), ("data_rank", data_rank, 0)):
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        if value is not None and not (whole and value >= least):
            raise GuardError(f"guard({name}={value!r}) is not a whole number from {least}: give one, or None")
    is_group = distributed.is_available() and isinstance(replica_group, distributed.ProcessGroup)
    if replica_group is not None and not is_group:
        raise GuardError(
            f"guard(replica_group={replica_group!r}) is not a process group: give one of torch.distributed, or None"
        )


def _known(name: Any, known: Mapping[str, Any]) -> None:
    if not isinstance(name, str) or name not in known:
        raise GuardError(f"guard knows no {name!r}: choose one of {', '.join(known)}")
