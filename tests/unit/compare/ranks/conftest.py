"""The records of a made-up update as the ranks of a mesh would write them, each with its tokens and its shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from regress.compare.record_plan import Plan
from regress.compare.update_judge import judge_update
from regress.compare.verdicts.tolerance import Tolerance
from regress.compare.verdicts.verdict import Verdict
from regress.dump.coordinates import Coordinates, Place
from regress.dump.numpy_arrays import Array
from regress.dump.record import Record
from regress.layout import BatchPlan, Mesh, RankLayout, RankPlan, ShardLayout, plan_ranks

FUSED = ((0, 4), (4, 6), (6, 8))
"""Rows of query, key and value in one weight."""

PARAMETERS: dict[str, tuple[int, ...]] = {
    "embed.weight": (7, 3),
    "layers.0.qkv.weight": (8, 3),
    "layers.0.o.weight": (3, 5),
    "layers.0.experts.weight": (3, 2, 2),
    "norm.weight": (3,),
}
LOSS_TYPES = ("forward_data", "is_loss_debug", "loss")


def chunk(size: int, parts: int, index: int) -> tuple[tuple[int, int], ...]:
    """The range of one of several parts of a dimension, as torch.chunk cuts it; none for those that get nothing."""
    width = -(-size // parts)
    start, stop = min(index * width, size), min((index + 1) * width, size)
    return ((start, stop),) if start < stop else ()


def cut(shape: Sequence[int], dim: int, ranges: Sequence[tuple[int, int]]) -> ShardLayout:
    """A tensor of which one dimension is cut."""
    whole = ShardLayout.whole(shape).ranges
    return ShardLayout(tuple(shape), (*whole[:dim], tuple(ranges), *whole[dim + 1 :]))


@dataclass
class Ranks:
    """A world of canonical values (see the outer conftest) on a mesh.

    Attributes:
        records: of all ranks; a test may change them.
    """

    world: Any
    batch: BatchPlan
    ranks: RankPlan
    tolerances: Callable[[str], Tolerance]
    records: list[Record] = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(7)
        truth = self.world.truth
        for quantity in ("gradient", "param"):
            truth[quantity] = {name: rng.standard_normal(shape) for name, shape in PARAMETERS.items()}
        truth["optimizer"] = {
            **{f"{name}/exp_avg": rng.standard_normal(shape) for name, shape in PARAMETERS.items()},
            **{f"{name}/step": np.array(11.0, np.float32) for name in PARAMETERS},
        }
        self.layouts: list[list[RankLayout]] = plan_ranks(self.world.lengths, self.batch, self.ranks)
        self.records = [record for rank in range(self.mesh.world_size) for record in self._of(rank)]

    @property
    def mesh(self) -> Mesh:
        return self.ranks.mesh

    @property
    def plan(self) -> Plan:
        mesh, everyone = self.mesh, range(self.mesh.world_size)
        record_type = {rank: mesh.coordinates(rank)["pp"] for rank in everyone}
        return Plan(
            micros=tuple((rank, micro) for rank in everyone for micro in range(len(self.layouts[rank]))),
            replicas={rank: mesh.group(rank, "pp", "tp")[0] for rank in everyone},
            parts=record_type,
            without_loss=frozenset(rank for rank in everyone if record_type[rank] < mesh.pp - 1),
        )

    def judge(self, dtype: str | None = None) -> list[Verdict]:
        return judge_update(
            self.records,
            self.world.truth,
            self.world.frame,
            self.tolerances,
            place=Place(0),
            planned=self.plan,
            dtype=None if dtype is None else lambda quantity, name: dtype,
        )

    def faults(self, dtype: str | None = None) -> list[Verdict]:
        return [verdict for verdict in self.judge(dtype) if not verdict.ok]

    def record(self, record_type: str, rank: int, micro: int | None = None) -> Record:
        (found,) = (r for r in self.records if (r.type, r.rank, r.micro) == (record_type, rank, micro))
        return found

    def edit(self, record_type: str, rank: int, micro: int | None, name: str) -> Array:
        """A tensor of a record, of which a copy takes its place and may be changed."""
        record = self.record(record_type, rank, micro)
        record.tensors[name] = record.tensors[name].copy()
        return record.tensors[name]

    def shard(self, record_type: str, rank: int, name: str) -> ShardLayout:
        shards: Any = self.record(record_type, rank).meta["shards"]
        return ShardLayout.from_json(shards[name])

    def holds(self, rank: int, name: str) -> bool:
        """Return True if a parameter or module is on a rank's stage: the embedding is tied to the last one."""
        record_type, last = self.mesh.coordinates(rank)["pp"], self.mesh.pp - 1
        return (record_type == 0 and name.startswith(("embed", "layers", "model"))) or (
            record_type == last and name.startswith(("embed", "norm", "lm_head"))
        )

    def layout_of(self, rank: int, name: str) -> ShardLayout:
        """The part of a parameter on a rank: tensor or expert parallel, and of that a shard of fsdp."""
        shape, place, sizes = PARAMETERS[name], self.mesh.coordinates(rank), self.mesh.sizes
        layout = ShardLayout.whole(shape)
        tp = sizes["tp"], place["tp"]
        if name == "embed.weight":
            layout = cut(shape, 0, chunk(shape[0], *tp))
        elif name.endswith("qkv.weight"):
            pieces = [(start + a, start + b) for start, stop in FUSED for a, b in chunk(stop - start, *tp)]
            layout = cut(shape, 0, pieces)
        elif name.endswith("o.weight"):
            layout = cut(shape, 1, chunk(shape[1], *tp))
        elif name.endswith("experts.weight"):
            layout = cut(shape, 0, chunk(shape[0], sizes["ep"], place["ep"]))
        local = layout.local_shape
        return cut(local, 0, chunk(local[0], sizes["fsdp"], place["fsdp"])).inside(layout)

    def _of(self, rank: int) -> list[Record]:
        found = [r for micro, at in enumerate(self.layouts[rank]) for r in self._micro(at, rank, micro)]
        for record_type in ("gradient", "param", "optimizer"):
            tensors, shards = {}, {}
            for name, values in self.world.truth[record_type].items():
                parameter = name.split("/")[0]
                if self.holds(rank, parameter):
                    layout = self.layout_of(rank, parameter) if values.ndim else ShardLayout.whole(())
                    tensors[name] = np.ascontiguousarray(layout.project(values)).reshape(layout.local_shape)
                    if not layout.is_whole:
                        shards[name] = layout.to_json()
            norm = {"grad_norm": 1.5} if record_type == "gradient" else {}
            found.append(
                Record.of(record_type, Coordinates(0, rank=rank), tensors, {"shards": shards, **norm})
            )
        return found

    def _micro(self, at: RankLayout, rank: int, micro: int) -> list[Record]:
        inputs, hidden, *_ = self.world.micro_records(at.tokens, rank, micro)
        _, logits, *loss = self.world.micro_records(at.targets, rank, micro)
        tensors = {n: a for n, a in hidden.tensors.items() if n != "lm_head" and self.holds(rank, n)}
        shards: dict[str, ShardLayout] = {}
        tp = self.mesh.tp, self.mesh.coordinates(rank)["tp"]
        if self.ranks.sequence_parallel and "model.layers.0" in tensors:
            shape = tensors["model.layers.0"].shape
            shards["model.layers.0"] = cut(shape, 1, chunk(shape[1], *tp))
        if self.holds(rank, "lm_head"):
            tensors["lm_head"] = logits.tensors["lm_head"]
            shape = tensors["lm_head"].shape
            shards["lm_head"] = cut(shape, 2, chunk(shape[2], *tp))
        parts = {
            name: np.ascontiguousarray(shards[name].project(array)) if name in shards else array
            for name, array in tensors.items()
        }
        meta: Mapping[str, Any] = {
            **hidden.meta,
            "shards": {name: layout.to_json() for name, layout in shards.items() if not layout.is_whole},
            "rows": logits.meta,
        }
        found = [inputs, Record.of("activations", hidden.where, parts, meta)]
        return [*found, *loss] if self.mesh.coordinates(rank)["pp"] == self.mesh.pp - 1 else found


@pytest.fixture(scope="session")
def make_ranks(make_world: Any, tolerances: Any) -> Callable[..., Ranks]:
    """``make_ranks(lengths, batch, sequence_parallel=..., dp=2)``: the records of an update on a mesh."""

    def make(lengths: Sequence[int], batch: BatchPlan | None = None, **given: Any) -> Ranks:
        splits = {name: given.pop(name) for name in [*given] if "_" in name}
        return Ranks(
            make_world(lengths, seed=1), batch or BatchPlan(), RankPlan(Mesh(**given), **splits), tolerances
        )

    return make
