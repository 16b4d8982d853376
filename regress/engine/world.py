"""The ranks of a run as the engine sees them: where this process stands, and what it says to the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torch import Tensor
from transformers import PreTrainedModel

from regress.engine.policy import LocalPolicy
from regress.errors import RegressError
from regress.layout import RankPlan

T = TypeVar("T")


class Ranks(Protocol):
    """A process among others that run the same program. All methods are called by all of them.

    Attributes:
        rank: number of this process.
        plan: the mesh, and how samples and tokens are dealt out over it.
    """

    rank: int
    plan: RankPlan

    @property
    def main(self) -> bool:
        """Whether this process writes what is written once."""

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the ranks that compute the loss of different tokens; the others count as 0."""

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, in their order, on all of them."""


class World(Ranks, Protocol):
    """The ranks of a run, which make a policy of a model."""

    def policy(self, model: PreTrainedModel, **settings: Any) -> LocalPolicy:
        """The model as a policy over all ranks; ``settings`` are those of `LocalPolicy`."""


class Alone:
    """The only process of a run."""

    rank = 0
    main = True

    def __init__(self) -> None:
        self.plan = RankPlan()

    def sum(self, values: Tensor) -> Tensor:
        """The values themselves."""
        return values

    def gather(self, value: Any) -> list[Any]:
        """The one value."""
        return [value]

    def policy(self, model: PreTrainedModel, **settings: Any) -> LocalPolicy:
        """The model as it is."""
        return LocalPolicy(model, **settings)


def agreed(world: Ranks, work: Callable[[], T]) -> T:
    """What the work of this rank comes to, if no rank fails at its own; the work waits for no other rank.

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
    if own is not None and str(own) == str(first):
        raise own  # which knows its cause
    raise first
