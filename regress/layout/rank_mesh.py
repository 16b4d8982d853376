"""Ranks of a run, arranged along the dimensions of parallelism."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import product

DIMENSIONS = ("pp", "dp", "fsdp", "ep", "cp", "tp")
"""Mesh dimensions, outermost first: ranks that communicate most (tensor parallel) are neighbours, as in
Megatron and torchtitan.
"""

DATA = ("dp", "fsdp", "ep")
"""Dimensions along which ranks hold different samples."""


@dataclass(frozen=True)
class Mesh:
    """Extent of each parallel dimension; ranks are numbered in row-major order.

    Attributes:
        pp: pipeline stages.
        dp: replicas of the model that see different samples.
        fsdp: ranks that share the parameters' storage, and see different samples.
        ep: ranks that share the experts, and see different samples; all other parameters are replicated over them.
        cp: ranks that share the tokens of each sequence.
        tp: ranks that share each matrix product, on the same tokens.

    Raises:
        ValueError: for an extent below 1.
    """

    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for name, size in self.sizes.items():
            if size < 1:
                raise ValueError(f"parallel.{name}={size} is not a number of ranks; give 1 or more")

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Dimension -> extent, outermost first."""
        return asdict(self)

    @cached_property
    def world_size(self) -> int:
        """Number of ranks in the mesh."""
        return math.prod(self.sizes.values())

    @property
    def data_size(self) -> int:
        """Number of shares the samples are divided into: ranks that hold different samples."""
        return math.prod(self.sizes[name] for name in DATA)

    def data_index(self, rank: int) -> int:
        """Return the index of the share of samples that a rank holds, of ``data_size`` shares."""
        place = self.coordinates(rank)
        index = 0
        for name in DATA:
            index = index * self.sizes[name] + place[name]
        return index

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the index of the rank along each dimension."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not one of the {self.world_size} ranks of {self}")
        place = {}
        for name, size in reversed(list(self.sizes.items())):
            rank, place[name] = divmod(rank, size)
        return {name: place[name] for name in DIMENSIONS}

    def rank_of(self, **coordinates: int) -> int:
        """Return the rank at these indices; dimensions that are not given count as 0."""
        rank = 0
        for name, size in self.sizes.items():
            rank = rank * size + coordinates.get(name, 0)
        return rank

    def group(self, rank: int, *dimensions: str) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` only along these dimensions, itself included, ascending."""
        place = self.coordinates(rank)
        extents = [range(self.sizes[name]) for name in dimensions]
        found = (
            self.rank_of(**{**place, **dict(zip(dimensions, at, strict=True))}) for at in product(*extents)
        )
        return tuple(sorted(found))

    def __str__(self) -> str:
        """Return the mesh as text such as ``dp2-tp2``, or ``one rank``."""
        named = [f"{name}{size}" for name, size in self.sizes.items() if size > 1]
        return "-".join(named) or "one rank"
