"""Ranks of a run, how they share the work, and the factor by which its backward pass averages over them."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import distributed, nn

from regress.capture.model_structure import is_distributed
from regress.errors import CaptureError
from regress.layout import DIMENSIONS, Mesh

NAMES = {
    **{name: name for name in DIMENSIONS},
    **dict.fromkeys(("dp_replicate", "replicate", "ddp", "data", "data_parallel"), "dp"),
    **dict.fromkeys(("dp_shard", "shard", "dp_shard_cp", "fsdp"), "fsdp"),
    **dict.fromkeys(("sp", "context", "ulysses"), "cp"),
    **dict.fromkeys(("tensor", "model", "mp"), "tp"),
}
"""Usual name -> dimension of a mesh."""


@dataclass
class World:
    """The ranks of a run.

    Attributes:
        given: extent of each dimension, where the caller says it.
        sequence: ranks that hold slices of the same sequences.
        averaged: ranks over which the gradient of a backward pass is averaged; 1 where it is summed or left alone.
    """

    given: Mapping[str, int] | None = None
    sequence: int = 1
    averaged: float = 1.0
    _ddp: int = 1
    _sizes: dict[str, int] = field(default_factory=dict)

    @property
    def joined(self) -> bool:
        """True if there is a process group."""
        return distributed.is_available() and distributed.is_initialized()

    @property
    def rank(self) -> int:
        """Number of this process."""
        return distributed.get_rank() if self.joined else 0

    @property
    def size(self) -> int:
        """Number of processes."""
        return distributed.get_world_size() if self.joined else 1

    @property
    def expected(self) -> int:
        """Number of processes; before they have joined, the number that launchers tell."""
        return self.size if self.joined else int(os.environ.get("WORLD_SIZE", "1") or 1)

    def gather(self, value: Any) -> list[Any]:
        """Gather a value from every rank, in their order."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, value)
        return found

    def look(self, root: nn.Module) -> None:
        """Note which wrapper runs the forward pass that is under way."""
        ddp = nn.parallel.DistributedDataParallel._get_active_ddp_module() if self.size > 1 else None
        if ddp is not None:
            self._ddp = int(ddp.process_group.size())
            self.averaged = float(self._ddp)
        group = next(_fsdp_groups(root), None)
        if group is not None:
            factor = getattr(group, "gradient_divide_factor", None)
            self.averaged = float(factor) if factor else float(math.prod(_fsdp_sizes(group).values()))

    def sizes(self, root: nn.Module) -> dict[str, int]:
        """Return the extent of each dimension of more than one rank.

        Raises:
            CaptureError: if nothing tells how the ranks share the work.
        """
        if not self._sizes and self.size > 1:
            self._sizes = _checked(dict(self.given), self.size) if self.given else self._found(root)
        return self._sizes

    def root(self, model: nn.Module) -> int:
        """Return the first rank that holds the same samples as this one."""
        sizes = self.sizes(model)
        return Mesh(**sizes).group(self.rank, "pp", "tp", "cp")[0] if sizes else self.rank

    def _found(self, root: nn.Module) -> dict[str, int]:
        group = next(_fsdp_groups(root), None)
        sizes = {} if group is None else _fsdp_sizes(group)
        parameters: list[Any] = [p for p in root.parameters() if is_distributed(p)]
        meshes = [p.device_mesh for p in parameters]
        largest = max(meshes, key=lambda mesh: mesh.size(), default=None)
        if largest is not None:
            known = math.prod(sizes.values())
            if group is None:
                sizes |= _mesh_sizes(largest)
            elif largest.size() > known:
                sizes["tp"] = largest.size() // known
        if self.sequence > 1:
            sizes["cp"] = self.sequence
        rest = self.size // max(math.prod(sizes.values()), 1)
        if rest > 1 and self._ddp == rest:
            sizes["dp"] = sizes.get("dp", 1) * rest
        sizes = {name: size for name, size in sizes.items() if size > 1}
        return _checked(sizes, self.size)


def _checked(sizes: dict[str, int], world: int) -> dict[str, int]:
    unknown = sorted(set(sizes) - set(DIMENSIONS))
    if unknown:
        raise CaptureError(
            f"mesh dimension {unknown[0]!r} does not exist: choose one of {', '.join(DIMENSIONS)} in record(mesh=...)"
        )
    if math.prod(sizes.values()) != world:
        found = ", ".join(f"{name} {size}" for name, size in sizes.items()) or "nothing"
        raise CaptureError(
            f"nothing tells what the {world} ranks share (found: {found}): say it with "
            f"record(mesh={{...}}), such as "
            f'{{"dp": {world}}} for ranks that hold different samples or {{"tp": {world}}} for ranks that '
            "share the same"
        )
    return {name: sizes[name] for name in DIMENSIONS if sizes.get(name, 1) > 1}


def _mesh_sizes(mesh: Any) -> dict[str, int]:
    if mesh.ndim == 1:
        return {"tp": int(mesh.size())}
    names = mesh.mesh_dim_names or ()
    sizes: dict[str, int] = {}
    for index, name in enumerate(names):
        if name not in NAMES:
            raise CaptureError(f"""mesh dimension {name!r} of the model's parameters says nothing about what its ranks
            share: give extents with record(mesh={{...}}), of the dimensions {", ".join(DIMENSIONS)}""")
        sizes[NAMES[name]] = sizes.get(NAMES[name], 1) * int(mesh.size(index))
    return sizes


def _fsdp_groups(root: nn.Module) -> Iterator[Any]:
    """Yield the parameter groups of modules that `fully_shard` was applied to."""
    if "torch.distributed.fsdp" not in sys.modules:
        return
    from torch.distributed.fsdp import FSDPModule

    for module in root.modules():
        if isinstance(module, FSDPModule):
            yield from module._get_fsdp_state()._fsdp_param_groups


def _fsdp_sizes(group: Any) -> dict[str, int]:
    info = group.mesh_info
    found = {
        "dp": int(getattr(info, "replicate_mesh_size", 1) or 1),
        "fsdp": int(getattr(info, "shard_mesh_size", 1) or 1),
    }
    return {name: size for name, size in found.items() if size > 1}


def refuse_flat(root: nn.Module) -> None:
    """Refuse FSDP1, whose parameters are cut out of one flat buffer.

    Raises:
        CaptureError: if the model is wrapped by it and more than one rank shares its parameters.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for module in root.modules():
        if not isinstance(module, fsdp.FullyShardedDataParallel):
            continue
        if not getattr(module, "_use_orig_params", False):
            raise CaptureError("""FullyShardedDataParallel without use_orig_params hides the parameters in flat buffers:
            build it with use_orig_params=True, or use fully_shard""")
        if module.world_size > 1 and "NO_SHARD" not in str(module.sharding_strategy):
            raise CaptureError("""FullyShardedDataParallel cuts parameters out of one flat buffer, whose pieces are not
            blocks of a tensor: use fully_shard, or ShardingStrategy.NO_SHARD while recording""")
