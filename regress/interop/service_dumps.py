"""Dump directories of a training service: records of requests, and the index that says whose they are.

The index stands for a manifest (`regress.dump.request_index`). Samples are datums: their tokens tell which of a
trainer's they are. Both wires carry numbers in float32, so that values are judged as of that precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from regress.dump.chunk_checksums import Span
from regress.dump.coordinates import Coordinates, parse_stem
from regress.dump.dump_location import Location
from regress.dump.dump_reader import files_within, is_dump_file, read
from regress.dump.numpy_arrays import Array
from regress.dump.record import Record
from regress.dump.request_index import INDEX, DumpedRequest, Operation, Part, read_requests
from regress.dump.source_readers import Reader, Source
from regress.errors import DumpError
from regress.json_schema import conform
from regress.layout import Segment, TokenLayout
from regress.printable_text import printable

PER_MICROBATCH = ("forward_data", "loss", "is_loss_debug", "batch_inputs")
_ALWAYS: Mapping[str, frozenset[str]] = {
    "batch_inputs": frozenset({"input_ids"}),
    "forward_data": frozenset({"log_probs", "response_mask"}),
    "loss": frozenset({"loss"}),
    "is_loss_debug": frozenset(
        {
            *("log_probs", "old_log_probs", "advantages", "prob_ratio", "elementwise_loss"),
            *("effective_valid", "loss"),
        }
    ),
}
"""Tensors of each type that document 4.3 of NexRL names; others depend on the loss."""
_INDEXED = f"{INDEX}#"


class ServiceDump(Source):
    """A dump directory of a training service.

    Attributes:
        folder: the directory.
        requests: the lines of its index.
    """

    system = "training service"
    precision: str | None = "float32"

    def __init__(self, folder: Location) -> None:
        self.folder = folder
        self.requests = read_requests(folder)
        models = dict.fromkeys(one.model_id for one in self.requests)
        if len(models) > 1:
            some = ", ".join(map(printable, [*models][:3]))
            raise DumpError(f"""{folder / INDEX} tells of several models ({some}), but a dump is of one: copy the lines
            and files of one of them""")

    @cached_property
    def passes(self) -> list[DumpedRequest]:
        """Requests whose gradients entered a step."""
        return [one for one in self.requests if one.operation == Operation.FORWARD_BACKWARD]

    @cached_property
    def entries(self) -> Mapping[str, tuple[str, Coordinates]]:
        """All records of training, in the order of steps, and token ids that only the index has."""
        found = {}
        for path in files_within(self.folder):
            where = parse_stem(path.stem) if is_dump_file(path) else None
            if where is not None:
                found[f"{path.parent.name}/{path.name}"] = (path.parent.name, where)
        types = ("batch_inputs", *(["forward_data"] if self._names_tokens(found) else []))
        telling = {where for type, where in found.values() if type in types}
        for where in self._parts:
            if where not in telling and any(where == place for _, place in found.values()):
                found[f"{_INDEXED}{where.stem}"] = ("batch_inputs", where)
        return dict(sorted(found.items(), key=lambda item: (item[1][1].step, item[0])))

    def _names_tokens(self, found: Mapping[str, tuple[str, Coordinates]]) -> bool:
        """Return True if the records of log-probs have token ids, as the first of them tells."""
        first = next((name for name, (type, _) in found.items() if type == "forward_data"), None)
        try:
            return first is not None and "input_ids" in read(self.folder / first).tensors
        except DumpError:
            return True  # a damaged file is named where it is compared

    @property
    def notes(self) -> Sequence[str]:
        """Notes on what the index tells."""
        early = [one for one in self.requests if one.operation == Operation.FORWARD]
        return [f"{len(early)} requests were forward only and were not compared"] if early else []

    def missing(self, step: int) -> list[str]:
        """Return the files that the index announces for a step, and that are not there."""
        there = {name.rpartition(".")[0] for name in self.entries}
        announced = dict.fromkeys(
            f"{type}/{Coordinates(step, rank=part.rank, micro=part.micro).stem}"
            for one in self.passes
            if one.step == step and not one.folder
            for type in one.types
            if type in PER_MICROBATCH
            for part in one.parts
        )
        return [name for name in announced if name not in there]

    def read(self, name: str) -> Record:
        """Read one record.

        Raises:
            DumpError: if its file is missing or damaged, or the index tells of other datums than it holds.
        """
        type, where = self.entries[name]
        if name.startswith(_INDEXED):
            return self._indexed(where)
        record = read(self.folder / name)
        if (record.type, record.where.stem) != (type, where.stem):
            raise DumpError(
                f"{self.folder / name} holds {record.type} of {record.where.stem}: copy the dump again"
            )
        if type not in PER_MICROBATCH:
            return record
        named: Any = record.meta.get("samples") or []
        known = {one.key(number) for one, part in self._parts.get(where, ()) for number in part.datums}
        try:
            conform(named, list[tuple[str | int, int]], "its list of samples")
        except ValueError as error:
            raise DumpError(f"{self.folder / name} is damaged ({error}): copy the dump again") from None
        unknown = [key for key in named if (str(key[0]), int(key[1])) not in known]
        if unknown:
            raise DumpError(f"""{self.folder / name} holds the datum {unknown[0][0]}/{unknown[0][1]}, of which {INDEX}
            does not tell: copy index and files of the same run""")
        return replace(record, meta={**record.meta, "unnamed": named})

    def _indexed(self, where: Coordinates) -> Record:
        """Return the token ids of a microbatch as the index has them."""
        datums = [
            (one.key(number), one.datums[number].tokens)
            for one, part in self._parts[where]
            for number in part.datums
        ]
        width = max(len(tokens) for _, tokens in datums)
        ids: Array = np.zeros((len(datums), width), np.int64)
        for row, (_, tokens) in zip(ids, datums, strict=True):
            row[: len(tokens)] = tokens
        segments = tuple(Segment(row, 0, len(tokens), row, 0) for row, (_, tokens) in enumerate(datums))
        keys = [list(key) for key, _ in datums]
        layout = TokenLayout((len(datums), width), segments).to_json()
        return Record.of(
            "batch_inputs", where, {"input_ids": ids}, {"layout": layout, "samples": keys, "unnamed": keys}
        )

    @cached_property
    def _parts(self) -> dict[Coordinates, list[tuple[DumpedRequest, Part]]]:
        found: dict[Coordinates, list[tuple[DumpedRequest, Part]]] = {}
        for one, part in self._microbatches():
            found.setdefault(Coordinates(one.step, rank=part.rank, micro=part.micro), []).append((one, part))
        return found

    def _microbatches(self) -> Iterator[tuple[DumpedRequest, Part]]:
        for one in self.passes:
            if not one.folder:
                yield from ((one, part) for part in one.parts)

    def verify(self, name: str, span: Span | None = None) -> None:
        """Read a file again, which verifies its checksum."""
        if not name.startswith(_INDEXED):
            read(self.folder / name)

    def root(self, rank: int) -> int:
        """Return the first rank that computes the same datums: ranks that share a model share its tokens."""
        return self._roots.get(rank, rank)

    @cached_property
    def _roots(self) -> Mapping[int, int]:
        by_rank: dict[int, list[tuple[Any, ...]]] = {}
        for one, part in self._microbatches():
            by_rank.setdefault(part.rank, []).append((one.step, one.seq_id, part.micro, part.datums))
        first: dict[tuple[Any, ...], int] = {}
        return {rank: first.setdefault(tuple(by_rank[rank]), rank) for rank in sorted(by_rank)}

    def writes(self, record_type: str, tensor: str | None = None) -> bool:
        """Return True for types that a service records, and their documented tensors.

        Inputs that it was not asked to record are not a gap: its other records and its index tell the tokens.
        """
        if record_type == "batch_inputs" and not any(record_type in one.types for one in self.passes):
            return False
        if tensor is None:
            return record_type in (*PER_MICROBATCH, "param", "gradient")
        return tensor in _ALWAYS.get(record_type, ()) or record_type in ("param", "gradient")


READER = Reader(ServiceDump.system, lambda path: (path / INDEX).is_file(), ServiceDump)
