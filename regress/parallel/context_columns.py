"""Columns of a microbatch that is split over ranks, and the visibility of tokens among them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from regress.engine.attention import refuse_beyond, visible
from regress.layout import TokenLayout


@dataclass(frozen=True, eq=False)
class ContextSegments:
    """Columns of a microbatch on each rank, and the tokens that each token sees.

    "Gathered" means all columns, rank after rank, each rank's in local order; in a zigzag split this is not
    the order of the whole layout. Attention does not depend on the order of its keys, so nothing is permuted
    back: the masks are gathered instead, once per microbatch.

    Attributes:
        whole: the layout before its columns were split.
        table: ``[ranks, T // ranks]`` columns of ``whole`` that lie on each rank, in local order.
        group: the ranks; ``None`` is the group of all.
    """

    whole: TokenLayout
    table: Tensor
    group: dist.ProcessGroup | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls,
        whole: TokenLayout,
        columns: Sequence[Sequence[tuple[int, int]]],
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> ContextSegments:
        """Build the segments from the column ranges on each rank of the group, in local order.

        Raises:
            ValueError: if these are not equal shares that together are each column once.
        """
        rows = [[column for start, stop in ranges for column in range(start, stop)] for ranges in columns]
        width = whole.shape[1]
        if sorted(itertools.chain(*rows)) != list(range(width)) or len({len(row) for row in rows}) != 1:
            raise ValueError(
                f"the column ranges {[list(ranges) for ranges in columns]} of {len(rows)} ranks are not equal shares "
                f"of {width} columns, each once; pad rows to a multiple of the ranks and split them without overlap"
            )
        return cls(whole, torch.tensor(rows, device=device), group)

    @property
    def ranks(self) -> int:
        """Number of ranks that share the columns."""
        return len(self.table)

    @cached_property
    def rank(self) -> int:
        """Index of this rank among them."""
        return dist.get_rank(self.group)

    @cached_property
    def gathered_mask(self) -> Tensor:
        """``[B, 1, T, T]`` True where a gathered query sees a gathered key."""
        return visible(self.whole, self.table.flatten(), self.table.flatten())

    @cached_property
    def local_mask(self) -> Tensor:
        """``[B, 1, T // ranks, T]`` True where a query of this rank sees a gathered key."""
        return visible(self.whole, self.table[self.rank], self.table.flatten())

    @cached_property
    def blocks(self) -> tuple[Tensor | None, ...]:
        """Per rank, ``[B, 1, T // ranks, T // ranks]`` True where a query on this rank sees one of its
        keys; None if none does.
        """
        blocks = self.local_mask.chunk(self.ranks, dim=3)
        seen = torch.stack([block.any() for block in blocks]).tolist()
        return tuple(block if some else None for block, some in zip(blocks, seen, strict=True))


def handed_on(
    context: ContextSegments | None, module: nn.Module, query: Tensor, others: Mapping[str, Any]
) -> ContextSegments:
    """Return the context that reached an attention function, beside its other keyword arguments.

    Raises:
        ConfigError: if the model asks for more than plain attention.
        ValueError: if the model did not hand it on, or the queries ``[B, heads, T, head_dim]`` are not its columns.
    """
    if context is None:
        raise ValueError(
            f"{type(module).__name__} got no context: it was called without one (sampling cannot run context-parallel) "
            "or does not hand keyword arguments on to its attention"
        )
    here, expected = (query.shape[0], query.shape[2]), (context.whole.shape[0], context.table.shape[1])
    if here != expected:
        raise ValueError(
            f"queries of shape [B, T]={list(here)} meet a context of {list(expected)}; give the model the columns that "
            "its context describes"
        )
    refuse_beyond(module, f"parallel.cp={context.ranks}", others)
    return context


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    """Compute attention ``[B, heads, T, head_dim]`` of queries to keys with as many heads, or a divisor of them."""
    grouped = key.shape[1] != query.shape[1]
    return scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=grouped)
