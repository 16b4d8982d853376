"""Dumps of any number of ranks, small and full of values, or of any size and with holes for values."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from regress.dump.canonical_json import dumps
from regress.dump.coordinates import Coordinates
from regress.dump.dump_files import Stamp, file_stamp, write_atomically
from regress.dump.dump_manifest import Entry, Manifest, Provenance, write_manifest
from regress.dump.formats import FORMATS, safetensors_format
from regress.dump.numpy_arrays import DTYPES
from regress.dump.record import Record
from regress.layout import Segment, ShardLayout, TokenLayout

SMALL = {"embed.weight": (130, 8), "mlp.weight": (67, 6), "norm.weight": (257,)}


@dataclass(frozen=True)
class Made:
    """Content of a dump. Values do not depend on its split over ranks.

    Attributes:
        samples: over all ranks; every rank has its share of them, in microbatches of ``rows``.
        params: name -> shape of the whole tensor, divided along its first dimension.
        noise: added to all log-probs, gradients and parameters.
    """

    ranks: int = 1
    samples: int = 64
    rows: int = 1
    tokens: int = 12
    params: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: SMALL)
    noise: float = 0.0
    record_types: tuple[str, ...] = ("batch_inputs", "forward_data", "loss", "gradient", "param")

    def write(self, folder: Path) -> Path:
        """The complete dump."""
        encode, entries = FORMATS["safetensors"].encode, {}
        for record in self.records():
            if record.type in self.record_types:
                name = f"{record.type}/{record.where.stem}.safetensors"
                stamp = write_atomically(folder / name, encode(record))
                entries[name] = Entry(record.type, record.where, stamp)
        finish(folder, entries, self.ranks)
        return folder

    def records(self) -> Iterator[Record]:
        """All records, in any order."""
        for rank in range(self.ranks):
            mine = range(rank * self.samples // self.ranks, (rank + 1) * self.samples // self.ranks)
            for micro, first in enumerate(range(mine.start, mine.stop, self.rows)):
                yield from self._microbatch(rank, micro, range(first, min(first + self.rows, mine.stop)))
            for record_type in ("gradient", "param"):
                yield self._shards(record_type, rank)

    def _microbatch(self, rank: int, micro: int, samples: range) -> Iterator[Record]:
        where = Coordinates(0, update=0, rank=rank, micro=micro)
        values = [np.random.default_rng(sample) for sample in samples]
        ids = np.stack([one.integers(5, 90, self.tokens) for one in values])
        log_probs = np.stack([-one.random(self.tokens, np.float32) - 0.1 for one in values])
        mask = np.ones_like(ids, bool)
        mask[:, : self.tokens // 3] = False
        layout = TokenLayout(ids.shape, tuple(Segment(i, 0, self.tokens, i, 0) for i in range(len(samples))))
        meta: Any = {"layout": layout.to_json(), "samples": [[f"g{s // 4}", s % 4] for s in samples]}
        yield Record.of("batch_inputs", where, {"input_ids": ids, "response_mask": mask}, meta)
        log_probs = (log_probs + np.float32(self.noise)).astype(np.float32)
        yield Record.of("forward_data", where, {"log_probs": log_probs, "response_mask": mask}, meta)
        loss = np.float32(np.where(mask, log_probs, 0).sum(dtype=np.float64))
        yield Record.of("loss", where, {"loss": loss}, meta)

    def _shards(self, record_type: str, rank: int) -> Record:
        tensors, shards = {}, {}
        for number, (name, shape) in enumerate(self.params.items()):
            full = np.random.default_rng([number, record_type == "param"]).standard_normal(shape, np.float32)
            layout = shard(shape, rank, self.ranks)
            tensors[name] = layout.project(full) + np.float32(self.noise)
            shards[name] = layout.to_json()
        meta = {} if self.ranks == 1 else {"shards": shards}
        return Record.of(record_type, Coordinates(0, update=0, rank=rank), tensors, meta)


def shard(shape: tuple[int, ...], rank: int, ranks: int) -> ShardLayout:
    """The rank's rows of a tensor; as even as can be."""
    start, stop = (shape[0] * edge // ranks for edge in (rank, rank + 1))
    rest = tuple(((0, size),) for size in shape[1:])
    return ShardLayout(shape, (((start, stop),) if start < stop else (), *rest))


def finish(folder: Path, entries: Mapping[str, Entry], ranks: int) -> None:
    """The manifest of ranks that hold different samples and shards."""
    provenance = Provenance(mesh={"world_size": ranks, "fsdp": ranks})
    write_manifest(folder, Manifest(provenance, "safetensors", dict(entries)))


@dataclass(frozen=True)
class Sparse:
    """A dump of parameters that takes hardly any space on the disk: what is not a value of ``values`` is 0.

    Attributes:
        params: name -> dtype and shape of the whole tensor, divided along its first dimension.
        values: name -> flat index in the whole tensor -> value.
    """

    ranks: int
    params: Mapping[str, tuple[str, tuple[int, ...]]]
    values: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    updates: int = 1

    def write(self, folder: Path) -> Path:
        """The complete dump; every update has the same values."""
        entries = {}
        for update, rank in product(range(self.updates), range(self.ranks)):
            where = Coordinates(0, update=update, rank=rank)
            name = f"param/{where.stem}.safetensors"
            entries[name] = Entry("param", where, self._file(folder / name, where, rank))
        finish(folder, entries, self.ranks)
        return folder

    def _file(self, path: Path, where: Coordinates, rank: int) -> Stamp:
        layouts = {name: shard(shape, rank, self.ranks) for name, (_, shape) in self.params.items()}
        tensors = {name: (dtype, layouts[name].local_shape) for name, (dtype, _) in self.params.items()}
        shards = {name: layout.to_json() for name, layout in layouts.items()}
        values = {name: _within(layouts[name], known) for name, known in self.values.items()}
        return sparse_file(path, "param", where, tensors, {"shards": shards}, values)


def _within(layout: ShardLayout, values: Mapping[int, float]) -> dict[int, float]:
    """Values by their index in a rank's rows, of those that lie there."""
    width = math.prod(layout.shape[1:])
    start, stop = (edge * width for edge in (layout.ranges[0] or ((0, 0),))[0])
    return {index - start: value for index, value in values.items() if start <= index < stop}


def sparse_file(
    path: Path,
    type: str,
    where: Coordinates,
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    meta: Mapping[str, Any],
    values: Mapping[str, Mapping[int, float]],
) -> Stamp:
    """Write a record of zeros, but for some values, as a file with holes."""
    arrays = {
        name: np.broadcast_to(np.zeros((), DTYPES[dtype]), shape) for name, (dtype, shape) in tensors.items()
    }
    place = {name: value for name, value in vars(where).items() if name != "step"}
    head = dumps(Record(type, where.step, arrays, dict(meta), **place).head())
    header: dict[str, Any] = {"__metadata__": {"regress": head, "sha256": "0" * 64}}
    end = 0
    for name, array in arrays.items():
        start, end = end, end + array.nbytes
        code = safetensors_format.CODES[tensors[name][0]]
        header[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
        for name, known in values.items():
            for index, value in known.items():
                array = arrays[name]
                file.seek(8 + len(text) + header[name]["data_offsets"][0] + index * array.itemsize)
                file.write(np.array(value, array.dtype).tobytes())
    return file_stamp(path)
