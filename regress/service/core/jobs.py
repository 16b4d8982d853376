"""Kinds of operations: their calls of the host and their entries in the journal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from regress.service.api import (
    AdamParams,
    Array,
    ModelInfo,
    ModelSpec,
    PassRequest,
    SamplingRequest,
    Saved,
    SaveKind,
    ServiceError,
)
from regress.service.core.hosted import Hosted
from regress.service.core.journal import Record
from regress.service.core.names import checked_name, save_path
from regress.service.core.operations import Ticket, Work
from regress.service.core.records import packed_result, packed_spec

LOADABLE = (SaveKind.WEIGHTS, SaveKind.STATE)


@dataclass(frozen=True)
class Outcome:
    """Result of an operation, and the records that make it last; ``undo`` takes it back if they cannot be written."""

    result: Any
    records: Sequence[Record] = ()
    undo: Callable[[], None] = field(default=lambda: None)


class Job(Work, Protocol):
    """Work of an operation; a dataclass, whose fields are the content of the request."""

    def run(self, hosted: Hosted, ticket: Ticket) -> Outcome:
        """Return the outcome; raises `ServiceError` if it is refused, and nothing is changed then."""


@dataclass(frozen=True)
class CreateModel:
    """Creation of a model that the service offers, or of a save."""

    kind: ClassVar[str] = "create_model"
    mutates: ClassVar[bool] = False
    session: str
    spec: ModelSpec | None = None
    path: str | None = None
    optimizer: bool = False

    def run(self, hosted: Hosted, ticket: Ticket) -> Outcome:
        model_id = ticket.lane
        origin: Record
        if self.path is None:
            assert self.spec is not None
            info: ModelInfo = hosted.call("create", model_id, self.spec)
            origin = {"spec": packed_spec(self.spec)}
        else:
            saved = hosted.saved(self.path)
            _require_loadable(saved.saved, self.optimizer)
            folder = str(hosted.store.path(saved.folder))
            info = hosted.call("create_from", model_id, folder, optimizer=self.optimizer)
            origin = {"folder": saved.folder, "optimizer": self.optimizer}
        hosted.created(model_id)
        created = {"is": "created", "id": model_id, "session": self.session, "origin": origin}
        return Outcome(info, [{**created, "info": packed_result(info)}], lambda: hosted.close_model(model_id))


@dataclass(frozen=True)
class ModelCall:
    """Call of a method by which a model is trained: a pass or an optimizer step."""

    method: Literal["run_pass", "optim_step"]
    argument: PassRequest | AdamParams

    @property
    def kind(self) -> str:
        if isinstance(self.argument, AdamParams):
            return "optim_step"
        return "forward" if self.argument.forward_only else "forward_backward"

    @property
    def mutates(self) -> bool:
        return self.kind != "forward"

    def run(self, hosted: Hosted, ticket: Ticket) -> Outcome:
        model = hosted.model(ticket.lane)
        return Outcome(hosted.call(self.method, model.id, self.argument, hosted.where(ticket)))


@dataclass(frozen=True)
class SamplerCall:
    """Call of a method of a sampler."""

    mutates: ClassVar[bool] = False
    kind: Literal["sample", "prompt_logprobs"]
    argument: SamplingRequest | Array

    def run(self, hosted: Hosted, ticket: Ticket) -> Outcome:
        hosted.sampler(ticket.lane)
        return Outcome(hosted.call(self.kind, ticket.lane, self.argument))


@dataclass(frozen=True)
class Save:
    """Save of a model; without a name it gets one, and is removed once newer ones have none either."""

    kind: ClassVar[str] = "save"
    mutates: ClassVar[bool] = False
    name: str | None
    what: SaveKind
    overwrite: bool

    def run(self, hosted: Hosted, ticket: Ticket) -> Outcome:
        model = hosted.model(ticket.lane)
        name = f"unnamed-{ticket.id}" if self.name is None else checked_name(self.name)
        path = save_path(model.id, self.what, name)
        if path in hosted.ledger.saves and not self.overwrite:
            raise ServiceError(
                f"there is a save {path} already; choose another name, or ask to overwrite it", code="exists"
            )
        pending = hosted.call("pending_gradients", model.id)
        if pending and self.what in LOADABLE:  # samplers have no use for gradients
            raise ServiceError(
                f"{model.id} has gradients of {pending} passes since its last optimizer step, which no save keeps; "
                "make an optimizer step first",
                code="pending_gradients",
            )

        def write(folder: Path) -> int:
            return int(hosted.call("save", model.id, str(folder), self.what))

        folder, step = hosted.store.write(f"{self.what.value}-{ticket.id}", write)
        saved = Saved(model.id, self.what, name, path, step)
        records: list[Record] = [
            {
                "is": "saved",
                "path": path,
                "saved": packed_result(saved),
                "folder": folder,
                "named": self.name is not None,
            }
        ]
        if self.what in LOADABLE:
            records.append(_point(model.id, folder, self.what is SaveKind.STATE, step, path))
        return Outcome(saved, records, lambda: hosted.store.remove(folder))


@dataclass(frozen=True)
class Load:
    """Load of a save into a model."""

    kind: ClassVar[str] = "load"
    mutates: ClassVar[bool] = True
    path: str
    optimizer: bool

    def run(self, hosted: Hosted, ticket: Ticket) -> Outcome:
        model = hosted.model(ticket.lane, goes_on=False)
        entry = hosted.saved(self.path)
        _require_loadable(entry.saved, self.optimizer)
        folder = str(hosted.store.path(entry.folder))
        step = int(hosted.call("load", model.id, folder, optimizer=self.optimizer))
        records = [_point(model.id, entry.folder, self.optimizer, step, self.path)]
        return Outcome(entry.saved, records, lambda: hosted.drop(model.id))


@dataclass(frozen=True)
class Close:
    """End of a model, whose saves stay, or of a sampler."""

    mutates: ClassVar[bool] = False
    kind: Literal["close_model", "close_sampler"]

    def run(self, hosted: Hosted, ticket: Ticket) -> Outcome:
        if self.kind == "close_sampler":
            hosted.close_sampler(ticket.lane)
            return Outcome(None, [{"is": "sampler_closed", "id": ticket.lane}])
        hosted.close_model(ticket.lane)
        known = ticket.lane in hosted.ledger.models
        return Outcome(None, [{"is": "model_closed", "id": ticket.lane}] if known else [])


def _require_loadable(saved: Saved, optimizer: bool) -> None:
    if saved.kind not in LOADABLE:
        raise ServiceError(
            f"{saved.path} is a save for samplers, which no training goes on from; save the weights or the state",
            code="wrong_save",
        )
    if optimizer and saved.kind is not SaveKind.STATE:
        raise ServiceError(
            f"{saved.path} has no optimizer state; load its weights alone, or save the state",
            code="wrong_save",
        )


def _point(model_id: str, folder: str, optimizer: bool, step: int, path: str) -> Record:
    return {
        "is": "point",
        "id": model_id,
        "folder": folder,
        "optimizer": optimizer,
        "step": step,
        "name": path,
    }
