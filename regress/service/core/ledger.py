"""State that outlasts the process: sessions, models, saves and operations, as the journal tells it.

The same records build it when they are written and when they are read again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from regress.service.api import ModelInfo, Saved
from regress.service.core.journal import Record
from regress.service.core.records import packed_result, unpacked_result


@dataclass
class Point:
    """Source of a restored model: the folder of a save, with or without its optimizer."""

    folder: str
    optimizer: bool
    step: int
    name: str
    """Path of the save, as clients know it."""


@dataclass
class ModelEntry:
    """Model that was created.

    Attributes:
        origin: record of its creation: ``spec``, or ``folder`` and ``optimizer`` of the save that it was made of.
        info: facts about it at its creation.
        step: its optimizer steps.
        point: its last save or load, None before there is any.
        unsaved: operations since then that have changed it.
        interrupted: why it does not go on until a save is loaded; None if it does.
    """

    id: str
    session: str
    origin: Record
    info: ModelInfo
    step: int
    point: Point | None = None
    unsaved: set[str] = field(default_factory=set)
    interrupted: str | None = None
    closed: bool = False

    @property
    def stands(self) -> str:
        """Clause that says at which step the model is restored."""
        if self.point is None:
            return f"{self.id} stands at step {self.info.step}, as it was created"
        without = "" if self.point.optimizer else " without optimizer state"
        return f"{self.id} stands at step {self.point.step}, its save {self.point.name}{without}"


@dataclass
class OperationEntry:
    """Operation that was accepted; ``ok`` is None until it has ended, and ``number`` that of a sampler's request."""

    id: str
    lane: str
    kind: str
    seq: int | None
    digest: str
    mutates: bool
    number: int | None = None
    ok: bool | None = None
    error: Record | None = None
    result: Record | None = None


@dataclass
class SaveEntry:
    """Complete save, and the folder below the state directory that holds it."""

    saved: Saved
    folder: str
    named: bool


@dataclass
class SamplerEntry:
    """Sampler of a save's folder, or of a base model."""

    id: str
    session: str
    path: str | None
    base_model: str | None
    folder: str | None


class Ledger:
    """Everything that the journal says.

    Args:
        remembered: number of operations that have ended and are remembered.
    """

    def __init__(self, remembered: int) -> None:
        self._remembered = remembered
        self.sessions: dict[str, Record] = {}
        self.session_keys: dict[str, str] = {}
        """Digest of a key -> session that was created with it."""
        self.finished: set[str] = set()
        self.models: dict[str, ModelEntry] = {}
        self.saves: dict[str, SaveEntry] = {}
        self.samplers: dict[str, SamplerEntry] = {}
        self.operations: OrderedDict[str, OperationEntry] = OrderedDict()
        self.creations: dict[str, str] = {}
        """Model id -> operation that creates it."""
        self.numbers: dict[tuple[str, int], str] = {}
        """Sampler and number of a request -> its operation."""

    def apply(self, record: Record) -> None:
        """Take a record in."""
        getattr(self, f"_{record['is']}")(record)

    def records(self) -> Iterator[Record]:
        """Return as few records as build this state."""
        keys = {id: key for key, id in self.session_keys.items()}
        for id, metadata in self.sessions.items():
            yield {"is": "session", "id": id, "metadata": metadata, "key": keys.get(id)}
        for id in self.finished:
            yield {"is": "session_finished", "id": id}
        for operation in self.operations.values():
            yield from _of_operation(operation)
        for model in self.models.values():
            yield from _of_model(model)
        for path, save in self.saves.items():
            packed = packed_result(save.saved)
            yield {"is": "saved", "path": path, "saved": packed, "folder": save.folder, "named": save.named}
        for sampler in self.samplers.values():
            yield {"is": "sampler", **vars(sampler)}

    @property
    def folders(self) -> set[str]:
        """Folders of saves that something may still be restored from."""
        found = {save.folder for save in self.saves.values()}
        for model in self.models.values():
            if not model.closed:
                found |= {model.point.folder} if model.point else set()
                found |= {model.origin["folder"]} if "folder" in model.origin else set()
        return found

    def _session(self, record: Record) -> None:
        self.sessions[record["id"]] = record["metadata"]
        if record.get("key") is not None:  # journals of earlier versions have none
            self.session_keys[record["key"]] = record["id"]

    def _session_finished(self, record: Record) -> None:
        self.finished.add(record["id"])

    def _accepted(self, record: Record) -> None:
        names = ("id", "lane", "kind", "seq", "digest", "mutates")
        entry = OperationEntry(*(record[name] for name in names))
        entry.number = record.get("number")  # journals of earlier versions have none
        self.operations[entry.id] = entry
        if entry.number is not None:
            self.numbers[entry.lane, entry.number] = entry.id
        if entry.kind == "create_model":
            self.creations[entry.lane] = entry.id
        while len(self.operations) > self._remembered:
            oldest = next(iter(self.operations.values()))
            if oldest.ok is None or oldest.id == self.creations.get(oldest.lane):
                break
            del self.operations[oldest.id]
            if oldest.number is not None:
                del self.numbers[oldest.lane, oldest.number]

    def _ended(self, record: Record) -> None:
        entry = self.operations.get(record["id"])
        if entry is None:
            return
        entry.ok, entry.error, entry.result = record["ok"], record.get("error"), record.get("result")
        model = self.models.get(entry.lane)
        if model is None or not entry.ok or not entry.mutates:
            return
        model.unsaved.add(entry.id)
        if entry.result is not None and entry.result["type"] == "optim":
            model.step = entry.result["step"]

    def _created(self, record: Record) -> None:
        info = unpacked_result(record["info"])
        assert isinstance(info, ModelInfo)
        entry = ModelEntry(record["id"], record["session"], record["origin"], info, info.step)
        self.models[entry.id] = entry

    def _model_closed(self, record: Record) -> None:
        self.models[record["id"]].closed = True

    def _saved(self, record: Record) -> None:
        saved = unpacked_result(record["saved"])
        assert isinstance(saved, Saved)
        self.saves.pop(record["path"], None)  # the newest comes last
        self.saves[record["path"]] = SaveEntry(saved, record["folder"], record["named"])

    def _save_removed(self, record: Record) -> None:
        self.saves.pop(record["path"], None)

    def _point(self, record: Record) -> None:
        """Take in what a model is restored from: nothing that came before can be lost any more."""
        model = self.models[record["id"]]
        model.point = Point(record["folder"], record["optimizer"], record["step"], record["name"])
        model.step, model.interrupted = record["step"], None
        model.unsaved.clear()

    def _restored(self, record: Record) -> None:
        model = self.models[record["id"]]
        model.step = record["step"]
        model.unsaved.clear()
        model.interrupted = record["interrupted"]

    def _sampler(self, record: Record) -> None:
        names = ("session", "path", "base_model", "folder")
        self.samplers[record["id"]] = SamplerEntry(record["id"], *(record[name] for name in names))

    def _sampler_closed(self, record: Record) -> None:
        self.samplers.pop(record["id"], None)


def _of_operation(operation: OperationEntry) -> Iterator[Record]:
    whole: dict[str, Any] = dict(vars(operation))
    ended = {name: whole.pop(name) for name in ("ok", "error", "result")}
    yield {"is": "accepted", **whole}
    if operation.ok is not None:
        yield {"is": "ended", "id": operation.id, **ended}


def _of_model(model: ModelEntry) -> Iterator[Record]:
    yield {
        "is": "created",
        "id": model.id,
        "session": model.session,
        "origin": model.origin,
        "info": packed_result(model.info),
    }
    if model.point is not None:
        yield {"is": "point", "id": model.id, **vars(model.point)}
    if model.closed:
        yield {"is": "model_closed", "id": model.id}
    if model.interrupted is not None or model.step != (model.point or model.info).step:
        yield {"is": "restored", "id": model.id, "step": model.step, "interrupted": model.interrupted}
