"""The ranks of a run as the engine sees them: where this process stands, and what it says to the others."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedModel

from regress.engine.policy import LocalPolicy
from regress.layout import RankPlan


class World(Protocol):
    """A process among others that run the same program. All methods but ``policy`` are called by all of them.

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
