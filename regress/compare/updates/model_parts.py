"""Parts of the model that ranks hold: a split that was asked for gives each rank a part of its own."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from regress.compare.updates.invariant_counts import Checked
from regress.dump.record import Record
from regress.layout import Mesh

WEIGHTS = ("gradient", "param")
"""Types whose records hold tensors of parameters, and in ``shards`` what part of each."""
SPLIT = ("pp", "fsdp", "ep", "tp")
"""Dimensions along which ranks hold different parts of the model."""
ADAPTER = ".lora_"
"""Part of the name of every tensor of a low-rank adapter, as PEFT writes it; adapters of a checkpoint have it, too."""

Part = tuple[str, str]
"""Name of a parameter, and its shard as text; an empty text for all of it."""


def check_parts(known: Checked, records: Iterable[Record], mesh: Mesh, config: Mapping[str, Any]) -> None:
    """Count, along each dimension that splits the model, the ranks that hold parts which no earlier one holds.

    Ranks that all compute with the whole model find the same values, so no other check tells that the split was never
    made. Nothing is counted unless all ranks recorded all parameters: frozen ones beside adapters are not recorded. A
    rank that holds none, such as a stage whose parameters are frozen, is not a copy of another.
    """
    split = [name for name in SPLIT if mesh.sizes[name] > 1]
    everything = (config.get("debug") or {}).get("target_param_pattern") == ".*"
    if not split or not everything:
        return
    by_rank: dict[int, set[Part]] = {}
    for record in records:
        if record.type in WEIGHTS and record.rank is not None:
            shards = record.meta.get("shards")
            sizes = shards if isinstance(shards, dict) else {}
            parts = {(name, json.dumps(sizes.get(name, ""), sort_keys=True)) for name in record.tensors}
            by_rank.setdefault(record.rank, set()).update(parts)
    adapted = any(ADAPTER in name for parts in by_rank.values() for name, _ in parts)
    if adapted or sorted(by_rank) != list(range(mesh.world_size)):
        return
    for name in split:
        seen: set[Part] = set()
        own = 0
        for index in range(mesh.sizes[name]):
            ranks = [rank for rank in by_rank if mesh.coordinates(rank)[name] == index]
            parts = set().union(*(by_rank[rank] for rank in ranks))
            own += not parts or bool(parts - seen)
            seen |= parts
        known.number(
            mesh.sizes[name], own, 0.0, f"the number of ranks with a part of their own along parallel.{name}"
        )
