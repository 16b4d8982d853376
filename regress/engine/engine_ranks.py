"""Ranks of a run as the engine sees them: this process's rank, and its collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torch import Tensor
from transformers import PreTrainedModel

from regress.engine.causal_lm_policy import LocalPolicy
from regress.errors import RegressError
from regress.layout import RankPlan

T = TypeVar("T")


class Ranks(Protocol):
    """Process among others that run the same program. All of them call every method.

    Attributes:
        rank: number of this process.
        plan: the mesh, and the split of samples and tokens over it.
    """

    rank: int
    plan: RankPlan

    @property
    def main(self) -> bool:
        """True if this process writes the files of the run."""

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks that compute the loss of different tokens; the others count as 0."""

    def gather(self, value: Any) -> list[Any]:
        """Return the value of every rank, in rank order, on all of them."""


class World(Ranks, Protocol):
    """Ranks of a run, which build a policy from a model."""

    def policy(self, model: PreTrainedModel, **settings: Any) -> LocalPolicy:
        """Return the model as a policy over all ranks; ``settings`` are those of `LocalPolicy`."""


class SingleProcess:
    """The only process of a run."""

    rank = 0
    main = True

    def __init__(self) -> None:
        self.plan = RankPlan()

    def sum(self, values: Tensor) -> Tensor:
        """Return the values unchanged."""
        return values

    def gather(self, value: Any) -> list[Any]:
        """Return the value in a list of one."""
        return [value]

    def policy(self, model: PreTrainedModel, **settings: Any) -> LocalPolicy:
        """Return the model as a policy in this process."""
        return LocalPolicy(model, **settings)


def raise_on_all_ranks(world: Ranks, work: Callable[[], T]) -> T:
    """Return the result of this rank's work if no rank fails at its own; the work must not wait for another rank.

    Raises:
        RegressError: on every rank the same, that of the first one that failed.
    """
    value: T | None = None
    own: RegressError | None = None
    try:
        value = work()
    except RegressError as error:
        own = error
    first = next((error for error in world.gather(own) if error is not None), None)
    if first is None:
        return value  # type: ignore[return-value]  # the work returned it
    raised = own if own is not None and str(own) == str(first) else first  # the own one knows its cause
    raised.on_all_ranks = True
    raise raised
