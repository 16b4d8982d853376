"""Kinds of operations: their calls of the host and their entries in the ledger."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from regress.service.core.host_proxy import Hosted
from regress.service.core.ledger_entries import Entry, ModelEntry, Point, Removed, SaveEntry
from regress.service.core.operations import PendingOperation, Work
from regress.service.core.save_storage import checked_name, save_path
from regress.service.service_api import (
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

LOADABLE = (SaveKind.WEIGHTS, SaveKind.STATE)


@dataclass(frozen=True)
class Outcome:
    """Result of an operation, and the entries that make it last; ``undo`` takes it back if they cannot be written."""

    result: Any
    entries: Sequence[Entry | Removed] = ()
    undo: Callable[[], None] = field(default=lambda: None)


class Job(Work, Protocol):
    """Work of an operation; a dataclass, whose fields are the content of the request."""

    def run(self, hosted: Hosted, pending: PendingOperation) -> Outcome:
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

    def run(self, hosted: Hosted, pending: PendingOperation) -> Outcome:
        model_id = pending.queue
        origin: ModelSpec | Point
        if self.path is None:
            assert self.spec is not None
            info: ModelInfo = hosted.call("create", model_id, self.spec)
            origin = self.spec
        else:
            saved = hosted.saved(self.path)
            _require_loadable(saved.saved, self.optimizer)
            folder = str(hosted.store.path(saved.folder))
            info = hosted.call("create_from", model_id, folder, optimizer=self.optimizer)
            origin = Point(saved.folder, self.optimizer)
        hosted.created(model_id)
        created = ModelEntry(model_id, self.session, origin, info, info.step)
        return Outcome(info, [created], lambda: hosted.close_model(model_id))


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

    def run(self, hosted: Hosted, pending: PendingOperation) -> Outcome:
        model = hosted.model(pending.queue)
        return Outcome(hosted.call(self.method, model.id, self.argument, hosted.where(pending)))


@dataclass(frozen=True)
class SamplerCall:
    """Call of a method of a sampler."""

    mutates: ClassVar[bool] = False
    kind: Literal["sample", "prompt_logprobs"]
    arguments: Sequence[SamplingRequest | Array]

    def run(self, hosted: Hosted, pending: PendingOperation) -> Outcome:
        hosted.sampler(pending.queue)
        return Outcome(hosted.call(self.kind, pending.queue, *self.arguments))


@dataclass(frozen=True)
class Save:
    """Save of a model; without a name it gets one, and is removed once newer ones have none either."""

    kind: ClassVar[str] = "save"
    mutates: ClassVar[bool] = False
    name: str | None
    what: SaveKind
    overwrite: bool

    def run(self, hosted: Hosted, pending: PendingOperation) -> Outcome:
        model = hosted.model(pending.queue)
        name = f"unnamed-{pending.id}" if self.name is None else checked_name(self.name)
        path = save_path(model.id, self.what, name)
        if path in hosted.ledger.saves and not self.overwrite:
            raise ServiceError(
                f"there is a save {path} already; choose another name, or ask to overwrite it", code="exists"
            )
        passes = hosted.call("pending_gradients", model.id)
        if passes and self.what in LOADABLE:  # samplers have no use for gradients
            raise ServiceError(
                f"""{model.id} has gradients of {passes} passes since its last optimizer step, which no save keeps; make
                an optimizer step first""",
                code="pending_gradients",
            )

        def write(folder: Path) -> int:
            return int(hosted.call("save", model.id, str(folder), self.what))

        folder, step = hosted.store.write(f"{self.what.value}-{pending.id}", write)
        saved = Saved(model.id, self.what, name, path, step)
        entries: list[Entry] = [SaveEntry(saved, folder, named=self.name is not None)]
        if self.what in LOADABLE:
            entries.append(_saved(model, Point(folder, self.what is SaveKind.STATE, step, path)))
        return Outcome(saved, entries, lambda: hosted.store.remove(folder))


@dataclass(frozen=True)
class Load:
    """Load of a save into a model."""

    kind: ClassVar[str] = "load"
    mutates: ClassVar[bool] = True
    path: str
    optimizer: bool

    def run(self, hosted: Hosted, pending: PendingOperation) -> Outcome:
        model = hosted.model(pending.queue, goes_on=False)
        entry = hosted.saved(self.path)
        _require_loadable(entry.saved, self.optimizer)
        folder = str(hosted.store.path(entry.folder))
        step = int(hosted.call("load", model.id, folder, optimizer=self.optimizer))
        loaded = _saved(model, Point(entry.folder, self.optimizer, step, self.path))
        return Outcome(entry.saved, [loaded], lambda: hosted.drop(model.id))


@dataclass(frozen=True)
class Close:
    """End of a model, whose saves stay, or of a sampler."""

    mutates: ClassVar[bool] = False
    kind: Literal["close_model", "close_sampler"]

    def run(self, hosted: Hosted, pending: PendingOperation) -> Outcome:
        if self.kind == "close_sampler":
            hosted.close_sampler(pending.queue)
            sampler = hosted.ledger.samplers.get(pending.queue)
            return Outcome(None, [] if sampler is None else [Removed(sampler)])
        hosted.close_model(pending.queue)
        model = hosted.ledger.models.get(pending.queue)
        return Outcome(None, [] if model is None else [replace(model, closed=True)])


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


def _saved(model: ModelEntry, point: Point) -> ModelEntry:
    """Return a model with another source to be restored from: nothing that came before can be lost any more."""
    return replace(model, point=point, step=point.step, interrupted=None, changed=False)
