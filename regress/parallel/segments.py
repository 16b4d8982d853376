"""The columns of a microbatch that is split over ranks, and who sees whom among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from regress.engine.attention import block_causal_mask
from regress.layout import TokenLayout


@dataclass(frozen=True, eq=False)
class ContextSegments:
    """Where the columns of a microbatch lie, and which tokens see which.

    "Gathered" means all columns, rank after rank, each rank's in local order; in a zigzag split this is not the
    order of the whole layout. Attention does not ask for the order of its keys, so nothing is ever permuted back:
    the masks are gathered instead, once per microbatch.

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
        columns: Sequence[tuple[int, int]],
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> ContextSegments:
        """From the column ranges that lie here. Collective: the ranks of the group tell each other theirs.

        Raises:
            ValueError: if the ranks do not hold equal shares that together are each column once.
        """
        ranks, width = dist.get_world_size(group), whole.shape[1]
        ranges = [torch.arange(start, stop, device=device) for start, stop in columns]
        mine = torch.cat(ranges) if ranges else torch.zeros(0, dtype=torch.long, device=device)
        if len(mine) * ranks != width:
            raise ValueError(
                f"{len(mine)} of {width} columns lie on one of {ranks} ranks; give every rank the same number, and pad "
                "rows to a multiple of it"
            )
        table = mine.new_empty(ranks * len(mine))
        dist.all_gather_into_tensor(table, mine, group=group)
        if not torch.equal(table.sort().values, torch.arange(width, device=device)):
            raise ValueError(
                f"the columns {table.view(ranks, -1).tolist()} of {ranks} ranks are not each of {width} columns once; "
                "split the row without overlap"
            )
        return cls(whole, table.view(ranks, -1), group)

    @property
    def ranks(self) -> int:
        """Ranks that share the columns."""
        return len(self.table)

    @cached_property
    def rank(self) -> int:
        """The place of this rank among them."""
        return dist.get_rank(self.group)

    @cached_property
    def gathered_mask(self) -> Tensor:
        """``[B, 1, T, T]`` True where a gathered query sees a gathered key."""
        mask = block_causal_mask(self.whole, "sdpa", torch.float32, self.table.device)
        gathered = self.table.flatten()
        return mask[:, :, gathered[:, None], gathered]

    @cached_property
    def local_mask(self) -> Tensor:
        """``[B, 1, T // ranks, T]`` True where a query of this rank sees a gathered key."""
        return self.gathered_mask.unflatten(2, (self.ranks, -1))[:, :, self.rank]

    @cached_property
    def blocks(self) -> tuple[Tensor | None, ...]:
        """Per rank, ``[B, 1, T // ranks, T // ranks]``: which of its keys the queries here see; None: not any."""
        blocks = self.local_mask.chunk(self.ranks, dim=3)
        seen = torch.stack([block.any() for block in blocks]).tolist()
        return tuple(block if some else None for block, some in zip(blocks, seen, strict=True))


def handed_on(context: ContextSegments | None, module: nn.Module, query: Tensor) -> ContextSegments:
    """The context that reached an attention function.

    Raises:
        ValueError: if the model did not hand it on, or the queries ``[B, heads, T, head_dim]`` are not its columns.
    """
    if context is None:
        raise ValueError(
            f"{type(module).__name__} got no context: it was called without one (sampling cannot run context-parallel) "
            "or does not hand keyword arguments on to its attention"
        )
    here, expected = (query.shape[0], query.shape[2]), (context.whole.shape[0], context.table.shape[1])
    if here != expected:
        raise ValueError(f"queries of shape [B, T]={list(here)} meet a context of {list(expected)}")
    return context


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    """Attention ``[B, heads, T, head_dim]`` of queries to keys with at most as many heads."""
    grouped = key.shape[1] != query.shape[1]
    return scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=grouped)
