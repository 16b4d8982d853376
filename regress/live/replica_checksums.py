"""Parameters that several ranks hold, compared by checksums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from regress.dump.tensor_placements import local

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: Tensor) -> Tensor:
    """Return two sums over the bits of a tensor, int64 ``[2]``; the second one depends on the places of elements."""
    flat = local(tensor).contiguous().reshape(-1)
    bits = flat.view(INTEGERS[flat.element_size()])
    width = 1024
    body = bits[: bits.numel() // width * width].reshape(-1, width)
    columns = torch.cat([body.sum(0, dtype=torch.int64), bits[body.numel() :].to(torch.int64)])
    rows = body.sum(1, dtype=torch.int64)
    return torch.stack([_weighted(columns), _weighted(rows)])


def _weighted(values: Tensor) -> Tensor:
    return (values * (2 * torch.arange(values.numel(), device=values.device) + 1)).sum()


def replica_groups(
    root: nn.Module, ddp: nn.Module | None, given: Any = None
) -> Iterator[tuple[Any, list[str]]]:
    """Yield process groups, and the names of the parameters that all ranks of the group hold alike.

    Args:
        root: the model.
        ddp: the DistributedDataParallel that wraps it, if any.
        given: group that the caller names for all plain parameters.
    """
    ignored = getattr(ddp, "parameters_to_ignore", ())
    plain = [
        name for name, p in root.named_parameters() if not hasattr(p, "placements") and name not in ignored
    ]
    group = given if ddp is None else ddp.process_group
    if group is not None and plain:
        yield group, plain
    found: dict[Any, list[str]] = {}
    for name, p in root.named_parameters():
        mesh: Any = getattr(p, "device_mesh", None)
        for index, placement in enumerate(getattr(p, "placements", ())):
            if placement.is_replicate() and mesh.size(index) > 1:
                found.setdefault(mesh.get_group(index), []).append(name)
    yield from found.items()


def differing(root: nn.Module, groups: Sequence[tuple[Any, list[str]]]) -> Iterator[str]:
    """Yield a sentence for each group in which the bytes of a parameter differ; all ranks of a group call it."""
    parameters = dict(root.named_parameters())
    for group, names in groups:
        own = torch.stack([checksum(parameters[name]) for name in names])
        ranks = distributed.get_process_group_ranks(group)
        gathered = [torch.empty_like(own) for _ in ranks]
        distributed.all_gather(gathered, own, group=group)
        for rank, theirs in zip(ranks[1:], gathered[1:], strict=True):
            wrong = (theirs != gathered[0]).any(-1).nonzero().flatten().tolist()
            if wrong:
                name = names[wrong[0]].removeprefix("module.")
                yield (
                    f"{name} differs between ranks {ranks[0]} and {rank} after the update, as do "
                    f"{len(wrong)} of {len(names)} parameters: their gradients were not averaged, or one of them made "
                    "another update"
                )
                break
