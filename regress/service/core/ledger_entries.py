"""Entries of a service's ledger, and their JSON."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from functools import cache
from typing import Any, TypeAlias, cast

from pydantic import TypeAdapter

from regress.service.service_api import Category, ModelInfo, ModelSpec, OptimResult, Saved, ServiceError


@dataclass(frozen=True)
class SessionEntry:
    """Session of a client; ``key`` is the digest of the key that it was created with."""

    id: str
    metadata: Mapping[str, Any]
    key: str | None = None
    finished: bool = False


@dataclass(frozen=True)
class Point:
    """Source of a restored model: the folder of a save, with or without its optimizer.

    Attributes:
        name: path of the save, as clients know it; empty for the save that a model was created of.
    """

    folder: str
    optimizer: bool
    step: int = 0
    name: str = ""


@dataclass(frozen=True)
class ModelEntry:
    """Model that was created.

    Attributes:
        origin: what it was created of.
        info: facts about it at its creation.
        step: its optimizer steps.
        point: its last save or load, None before there is any.
        since: number of ended operations at that moment, or when it was last restored.
        changed: True if operations since then have changed it.
        interrupted: why it does not go on until a save is loaded; None if it does.
    """

    id: str
    session: str
    origin: ModelSpec | Point
    info: ModelInfo
    step: int
    point: Point | None = None
    since: int = 0
    changed: bool = False
    interrupted: str | None = None
    closed: bool = False

    @property
    def stands(self) -> str:
        """Clause that says at which step the model is restored."""
        if self.point is None:
            return f"{self.id} stands at step {self.info.step}, as it was created"
        without = "" if self.point.optimizer else " without optimizer state"
        return f"{self.id} stands at step {self.point.step}, its save {self.point.name}{without}"


@dataclass(frozen=True)
class SaveEntry:
    """Complete save, and the folder below the state directory that holds it."""

    saved: Saved
    folder: str
    named: bool

    @property
    def id(self) -> str:
        """Path of the save."""
        return self.saved.path


@dataclass(frozen=True)
class SamplerEntry:
    """Sampler of a save's folder, or of a base model."""

    id: str
    session: str
    path: str | None
    base_model: str | None
    folder: str | None


@dataclass(frozen=True)
class Failure:
    """`ServiceError` as it is stored."""

    message: str
    code: str
    category: Category
    retryable: bool

    @classmethod
    def of(cls, error: ServiceError) -> Failure:
        """Return an error as it is stored."""
        return cls(str(error), error.code, error.category, error.retryable)

    @property
    def error(self) -> ServiceError:
        """The error."""
        return ServiceError(self.message, code=self.code, category=self.category, retryable=self.retryable)


Result: TypeAlias = ModelInfo | OptimResult | Saved
"""Results that are small enough to be remembered."""


@dataclass(frozen=True)
class OperationEntry:
    """Operation that was accepted.

    Attributes:
        seq, number: its sequence number, and that of a sampler's request.
        ended: how many operations had ended with it; None while it is under way.
    """

    id: str
    queue: str
    kind: str
    seq: int | None
    digest: str
    mutates: bool
    number: int | None = None
    ended: int | None = None
    ok: bool = False
    error: Failure | None = None
    result: Result | None = None

    @property
    def name(self) -> str:
        """Operation as errors name it."""
        return self.kind if self.seq is None else f"{self.kind} of seq_id {self.seq}"


Entry: TypeAlias = SessionEntry | ModelEntry | SaveEntry | SamplerEntry
KINDS: Mapping[type[Entry], str] = {
    SessionEntry: "session",
    ModelEntry: "model",
    SaveEntry: "save",
    SamplerEntry: "sampler",
}


@dataclass(frozen=True)
class Removed:
    """Entry that `Ledger.write` removes."""

    entry: Entry


@dataclass(frozen=True)
class Lost:
    """Changes of a model since its last save, which `Ledger.write` makes fail.

    Attributes:
        failure: error of each; ``{operation}`` in its message is the operation.
    """

    model: ModelEntry
    failure: Failure


Change: TypeAlias = Entry | OperationEntry | Removed | Lost


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def as_text(entry: Any) -> str | None:
    """Return an entry as JSON, None for None."""
    return None if entry is None else json.dumps(asdict(entry), default=_plain, separators=(",", ":"))


def _plain(value: Enum) -> Any:
    return value.value


def read_entry(kind: type[Any], values: Any) -> Any:
    """Return the entry of a JSON object; raises `ValueError` if it is none of that kind."""
    adapter: TypeAdapter[Any] = _adapter(cast(Hashable, kind))
    return adapter.validate_python(values)
