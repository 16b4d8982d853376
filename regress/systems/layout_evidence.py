"""Evidence that a layout is on: the types of parameters, and the collectives that process groups have counted."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import distributed, nn


def collectives() -> int:
    """Return the number of collectives that this rank has taken part in, over all of its process groups.

    The groups count them themselves, whoever calls: Python, DDP's reducer or FSDP.
    """
    if not distributed.is_initialized():
        return 0
    groups: list[Any] = list(distributed.distributed_c10d._world.pg_map)
    return sum(int(group._get_sequence_number_for_group()) for group in groups)


def parameter_types(model: nn.Module) -> dict[str, int]:
    """Return how many parameters there are of each type and placement: ``{"DTensor Shard(0)": 24}``."""
    found: Counter[str] = Counter()
    for parameter in model.parameters():
        placements = getattr(parameter, "placements", None)
        found[_placed(placements) if placements else type(parameter).__name__] += 1
    return dict(sorted(found.items()))


def _placed(placements: object) -> str:
    assert isinstance(placements, tuple)
    words = {p: f"Shard({p.dim})" if p.is_shard() else type(p).__name__ for p in placements}
    return f"DTensor {' '.join(words[p] for p in placements)}"


def held_share(model: nn.Module) -> float:
    """Return the part of the model's elements that this rank holds: 0.5 where two ranks have a half each."""
    whole = sum(parameter.numel() for parameter in model.parameters())
    local = [getattr(parameter, "_local_tensor", parameter) for parameter in model.parameters()]
    return sum(tensor.numel() for tensor in local) / whole
