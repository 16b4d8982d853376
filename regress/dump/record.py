"""Record: the named tensors of one type at one place of a run, with the metadata needed to understand them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NotRequired, TypedDict

from regress.dump.canonical_json import Json, dumps, plain
from regress.dump.coordinates import FIELDS, Coordinates
from regress.dump.file_damage import Damage
from regress.dump.numpy_arrays import DTYPES, Array, dtype_name, raw, to_numpy
from regress.dump.record_types import type_index, type_number
from regress.errors import DumpError
from regress.json_schema import Count, Name, conform

SCHEMA_VERSION = 1
_PAYLOAD_KEYS = (
    "step",
    "rank",
    "micro_idx",
    "shape",
    "batch_info",
    "metrics",
    "extra_info",
    "log_probs_shape",
)
_CONTAINERS = ("__metadata__", "regress", "entropy_shape", "params", "gradients", "tensors")
RESERVED = frozenset((*_PAYLOAD_KEYS, *_CONTAINERS))
"""Tensor names that the file formats reserve."""


class _Head(TypedDict):
    """Fields that `Record.head` writes."""

    type: Name
    meta: dict[str, Any]
    step: int
    update: NotRequired[Count | None]
    epoch: NotRequired[Count | None]
    mini_batch: NotRequired[Count | None]
    rank: NotRequired[Count | None]
    micro: NotRequired[Count | None]


LOSS_ROWS = "rows of the loss tokens, in order"
"""Says in a record's metadata, under the name of a tensor, what its rows are."""


@dataclass(eq=False)
class Record:
    """Tensors of one record type at one place, as they were computed.

    Attributes:
        type: name of a type in `regress.dump.record_types.RECORD_TYPES`.
        step, update, epoch, mini_batch, rank, micro: see `Coordinates`; None where it does not apply.
        tensors: name -> contiguous little-endian numpy array; bfloat16 and 8-bit floats through ml_dtypes.
        meta: plain JSON values: layout (`TokenLayout.to_json()`), denominators, the loss scale actually
            back-propagated, sample ids.

    Two records are equal, bit for bit, if their `checksum()` is.
    """

    type: str
    step: int
    tensors: dict[str, Array] = field(default_factory=dict)
    meta: dict[str, Json] = field(default_factory=dict)
    update: int | None = None
    epoch: int | None = None
    mini_batch: int | None = None
    rank: int | None = None
    micro: int | None = None

    @classmethod
    def of(
        cls, type: str, where: Coordinates, tensors: Mapping[str, Any], meta: Mapping[str, Any] | None = None
    ) -> Record:
        """Build a record from live values: tensors are copied to the CPU, metadata is reduced to plain JSON.

        Raises `DumpError` for an unknown type, a reserved tensor name, or a value a dump cannot hold.
        """
        type_index(type)
        copies = {check_name(name, type): to_numpy(value, name) for name, value in tensors.items()}
        info = {str(key): plain(value, f"meta[{key!r}]") for key, value in (meta or {}).items()}
        return cls(type, tensors=copies, meta=info, **{key: getattr(where, key) for key in FIELDS})

    @property
    def where(self) -> Coordinates:
        """Coordinates of this record."""
        return Coordinates(**{key: getattr(self, key) for key in FIELDS})

    @property
    def dataflow(self) -> int:
        """Number of the record's type, see `stage_number`."""
        return type_number(self.type)

    @property
    def nbytes(self) -> int:
        """Total bytes of all tensors."""
        return sum(array.nbytes for array in self.tensors.values())

    def head(self) -> dict[str, Json]:
        """Return everything but the tensor data, as plain JSON; its table of tensors keeps their order."""
        table: list[Json] = [[name, dtype_name(a.dtype), list(a.shape)] for name, a in self.tensors.items()]
        place: dict[str, Json] = {key: getattr(self, key) for key in FIELDS}
        return {
            "schema": SCHEMA_VERSION,
            "type": self.type,
            "dataflow": self.dataflow,
            **place,
            "tensors": table,
            "meta": self.meta,
        }

    def checksum(self) -> str:
        """Return the SHA-256 (hex) of the canonical JSON of `head()`, a zero byte, and the tensors' bytes
        in order.
        """
        return self.seal()[1]

    def seal(self) -> tuple[str, str]:
        """Return the canonical JSON of `head()`, and `checksum()`."""
        text = dumps(self.head())
        digest = hashlib.sha256(text.encode() + b"\0")
        for array in self.tensors.values():
            digest.update(raw(array))
        return text, digest.hexdigest()


def replace_tensors(record: Record, changed: Mapping[str, Array]) -> Record:
    """Return a copy of `record` with some tensors replaced, in their old order."""
    return replace(record, tensors={**record.tensors, **changed})


def from_head(head: Any, tensors: Mapping[str, Array]) -> Record:
    """Return the record that `head()` described; raises `Damage` if anything does not match."""
    if not isinstance(head, dict) or not isinstance(head.get("schema"), int):
        raise Damage("it lacks the description of its record")
    if head["schema"] != SCHEMA_VERSION:
        raise Damage(f"it has schema version {head['schema']}, this release reads version {SCHEMA_VERSION}")
    try:
        description: _Head = conform(head, _Head, "its description")
    except ValueError as error:
        raise Damage(str(error)) from None
    place: dict[str, Any] = {key: head.get(key) for key in FIELDS}
    record = Record(description["type"], tensors=dict(tensors), meta=description["meta"], **place)
    if dumps({key: value for key, value in head.items() if key != "sha256"}) != dumps(record.head()):
        raise Damage("its description of the record contradicts itself")
    return record


def tensor_table(head: Any) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return names, element types and shapes in a head; raises `Damage` for anything malformed."""
    table = head.get("tensors") if isinstance(head, dict) else None
    if not isinstance(table, list):
        raise Damage("it lacks the table of its tensors")
    return [_table_row(row) for row in table]


def _table_row(row: Any) -> tuple[str, str, tuple[int, ...]]:
    match row:
        case [str(name), str(dtype), list(shape)] if dtype in DTYPES:
            if all(type(size) is int and size >= 0 for size in shape):
                return name, dtype, tuple(shape)
    raise Damage(f"its table of tensors has the row {row!r}")


def check_name(name: str, type: str) -> str:
    """Return `name`, or raise `DumpError` when no file format could hold a tensor of that name."""
    if (
        not isinstance(name, str)
        or not name
        or name in RESERVED
        or not name.isprintable()
        or len(name) > 1000
    ):
        raise DumpError(f"tensor name {name!r} in {type!r} is reserved or not printable: choose another name")
    return name
