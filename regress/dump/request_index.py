"""Index of a training service's dump: which request, datum and sequence number lies in which file.

The service writes it, comparisons read it; this is the one definition of its lines. A dump of the service is a
directory with ``requests.jsonl`` beside the folders of the record types (``forward_data``, ``loss``, ``is_loss_debug``,
``batch_inputs``, ``param``, ``gradient``). Line by line it lists the executed requests of one model:

- A line is appended once the request was executed and its files are written whole, so that it stands for a manifest: a
  service that was killed leaves a readable dump. A last line that is cut off is not a line. Rank 0 writes all lines.
- ``step`` counts completed optimizer steps; ``micro`` counts microbatches within a step across requests, in the order
  of ``seq_id``. `Part` says which datums of the request lie in a microbatch of a rank, in the order of its rows.
- ``folder`` is where the files lie, relative to the index. Passes that are forward only, with a counter of their own,
  lie in ``forward_only``; models after the first have a directory with an index of their own.
- In records of tokens a datum is the sample `DumpedRequest.key`, and its positions are those of `DumpedDatum.tokens`
  (input and last target): what the loss had at input t belongs to position t + 1, as in a dump of the trainer itself.
- Requests that are not recorded (`WEAVER_DEBUG_DUMP_EVERY_N`) have lines, too, with no ``types``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, NotRequired, Self, TypedDict

from regress.dump.canonical_json import Json, dumps, loads, plain
from regress.dump.dump_location import Location, read_bytes
from regress.errors import DumpError
from regress.json_schema import Count, Name, conform
from regress.layout import SampleKey

INDEX = "requests.jsonl"
FORWARD_ONLY = "forward_only"
"""Folder of the passes without a backward pass."""

VARIABLES = (
    "WEAVER_DEBUG_DUMP_ENABLED",
    "WEAVER_DEBUG_DUMP_DIR",
    "WEAVER_DEBUG_DUMP_EVERY_N",
    "WEAVER_DEBUG_DUMP_OPTIONS",
)
"""Environment variables that turn a service's dump on."""

REQUESTED = "requested"
"""Key of ``extra_info`` of a client's ``training_metrics``: what it asked for, see `requested`."""


class Operation(StrEnum):
    """Operation of a line."""

    FORWARD_BACKWARD = "forward_backward"
    FORWARD = "forward"
    OPTIM_STEP = "optim_step"


class _Datum(TypedDict):
    tokens: list[Count]
    id: NotRequired[str | None]


class _Line(TypedDict):
    """A line of the index; unknown keys are of later releases."""

    model_id: str
    operation: Name
    step: Count
    seq_id: NotRequired[Count | None]
    request_id: NotRequired[str | None]
    folder: NotRequired[str]
    loss: NotRequired[str | None]
    config: NotRequired[dict[str, Any]]
    types: NotRequired[list[Name]]
    datums: NotRequired[list[_Datum]]
    parts: NotRequired[list[tuple[Count, Count, list[Count]]]]
    adam: NotRequired[dict[str, Any] | None]
    metrics: NotRequired[dict[str, Any]]


@dataclass(frozen=True)
class DumpedDatum:
    """A datum of a request.

    Attributes:
        tokens: ids of the whole sequence: the datum's input, and its last target.
        id: the client's name of it.
    """

    tokens: tuple[int, ...]
    id: str | None = None


@dataclass(frozen=True)
class Part:
    """A microbatch of a request on a rank: the numbers of its datums in the request, in the order of its rows."""

    rank: int
    micro: int
    datums: tuple[int, ...]


@dataclass(frozen=True)
class DumpedRequest:
    """A line of the index.

    Attributes:
        operation: see `Operation`.
        step: completed optimizer steps of the model before the request.
        seq_id: its place in the order of the model's requests; None if it came without one.
        request_id: the operation's id.
        loss, config: name and settings of the loss, as they took effect.
        types: record types of its files.
        parts: microbatches of a pass; on ranks that share a model (tp, pp) each has its own.
        adam: of an optimizer step: the settings that took effect, by the names of `AdamParams` in the service.
        metrics: numbers of the reply: ``loss:sum``, ``tokens:sum``; of an optimizer step ``grad_norm``,
            ``clipped_grad_norm``.
    """

    model_id: str
    operation: str
    step: int
    seq_id: int | None = None
    request_id: str | None = None
    folder: str = ""
    loss: str | None = None
    config: Mapping[str, Json] = field(default_factory=dict)
    types: tuple[str, ...] = ()
    datums: tuple[DumpedDatum, ...] = ()
    parts: tuple[Part, ...] = ()
    adam: Mapping[str, float] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    def key(self, datum: int) -> SampleKey:
        """Return the name of a datum in ``meta["samples"]`` of records: its request, and its number therein."""
        return f"request {self.seq_id if self.seq_id is not None else self.request_id}", datum

    def line(self) -> bytes:
        """Return the line, with its end; raises `DumpError` for values that are not plain data."""
        row: dict[str, Any] = {item.name: getattr(self, item.name) for item in fields(self)}
        row["datums"] = [{"tokens": [*d.tokens], "id": d.id} for d in self.datums]
        row["parts"] = [[part.rank, part.micro, [*part.datums]] for part in self.parts]
        return dumps(plain(row, INDEX)).encode() + b"\n"

    @classmethod
    def parse(cls, text: bytes | str) -> Self:
        """Return the request of a line; unknown keys are of later releases.

        Raises:
            ValueError, KeyError or TypeError: if it is none.
        """
        found: Any = conform(loads(text), _Line, "it")
        known = {item.name: found[item.name] for item in fields(cls) if item.name in found}
        known["types"] = tuple(map(str, known.get("types", ())))
        known["datums"] = tuple(
            DumpedDatum(tuple(map(int, one["tokens"])), one.get("id")) for one in known.get("datums", ())
        )
        known["parts"] = tuple(
            Part(int(rank), int(micro), tuple(map(int, numbers)))
            for rank, micro, numbers in known.get("parts", ())
        )
        for number in (n for part in known["parts"] for n in part.datums):
            known["datums"][number]
        return cls(**{**known, "step": int(known["step"]), "operation": str(Operation(known["operation"]))})


def read_requests(folder: Location) -> list[DumpedRequest]:
    """Return the requests of a service's dump, in the order of execution; a last line without an end is left out.

    Raises:
        DumpError: if the index is missing, or one of its lines is damaged.
    """
    path = folder / INDEX
    try:
        lines = read_bytes(path).split(b"\n")[:-1]
    except OSError as error:
        raise DumpError(f"{path} cannot be read ({error.strerror or error}): check the path") from None
    return list(_parsed(lines, path))


def _parsed(lines: Iterable[bytes], path: Location) -> Iterator[DumpedRequest]:
    for number, line in enumerate(lines, 1):
        try:
            yield DumpedRequest.parse(line)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise DumpError(
                f"{path}, line {number} is not a request of a training service ({error}): copy the dump again"
            ) from None


def requested(
    *,
    loss: str,
    config: Mapping[str, Any],
    adam: Mapping[str, float],
    seq_ids: Iterable[int] = (),
    temperature: float | None = None,
) -> dict[str, Json]:
    """Return what a client asked for in a step, for ``extra_info["requested"]`` of its ``training_metrics``.

    Args:
        config: settings of the loss as the client was configured, sent or not.
        adam: settings of the optimizer as the client was configured, by the names of `AdamParams` in the service.
        seq_ids: sequence numbers of the passes of the step, if the client knows them.
        temperature: that of the rollouts.
    """
    known = {
        "loss_fn": loss,
        "loss_fn_config": dict(config),
        "adam_params": dict(adam),
        "seq_ids": [*seq_ids],
        "temperature": temperature,
    }
    return {key: plain(value, f"{REQUESTED}.{key}") for key, value in known.items()}
