"""Dumps of the service: tensors of each executed request, and an index of them (`regress.dump.request_index`)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from regress.dump.dump_files import sync_folder, unwritable, write_atomically
from regress.dump.dump_manifest import MANIFEST
from regress.dump.formats import format_named
from regress.dump.record import Record
from regress.dump.recorder import Collector
from regress.dump.request_index import (
    FORWARD_ONLY,
    INDEX,
    VARIABLES,
    DumpedRequest,
    Operation,
    Part,
    read_requests,
)
from regress.engine.engine_ranks import World, raise_on_all_ranks
from regress.errors import ConfigError, DumpError

ENABLED, DIRECTORY, EVERY_N, OPTIONS = VARIABLES
TYPES = "forward_data", "loss", "is_loss_debug", "batch_inputs", "param", "gradient"
DEFAULT_TYPES = "forward_data", "loss", "is_loss_debug"
_SWITCH = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


@dataclass(frozen=True)
class DumpSettings:
    """Dumps that a service makes.

    Attributes:
        enabled: every request is dumped, at steps whose number divides by ``every``; otherwise those that ask for it.
        folder: directory of the dumps.
        types: record types.
    """

    enabled: bool
    folder: Path
    every: int = 1
    types: tuple[str, ...] = DEFAULT_TYPES

    @classmethod
    def of(cls, environ: Mapping[str, str], folder: Path) -> DumpSettings:
        """Return the settings that the environment variables ``WEAVER_DEBUG_DUMP_*`` name.

        Args:
            folder: directory of the dumps if none is named.

        Raises:
            ConfigError: for a value that is none.
        """
        switch = environ.get(ENABLED, "") or "0"
        if switch.lower() not in _SWITCH:
            raise ConfigError(f"{ENABLED}={switch} is neither on nor off; set it to 1 or 0")
        every = environ.get(EVERY_N, "") or "1"
        if not every.isdecimal() or int(every) < 1:
            raise ConfigError(f"{EVERY_N}={every} is not a number of steps; set it to 1 or more")
        listed = environ.get(OPTIONS, "") or ",".join(DEFAULT_TYPES)
        types = tuple(dict.fromkeys(name.strip() for name in listed.split(",") if name.strip()))
        for name in types:
            if name not in TYPES:
                raise ConfigError(
                    f"{OPTIONS} names {name}, which a service does not dump; choose one of {', '.join(TYPES)}"
                )
        named = environ.get(DIRECTORY, "")
        return cls(_SWITCH[switch.lower()], Path(named) if named else folder, int(every), types)


class Records(Collector):
    """Records of one request, which are written once it was executed."""

    def __init__(self, types: Sequence[str]) -> None:
        super().__init__(dict.fromkeys(types, True))
        self.records: list[Record] = []

    def put(self, record: Record, folder: str | None = None) -> None:
        """Keep a record."""
        self.records.append(record)


class Dumps:
    """Dumps of all models of a host. The first model's lie in the directory itself, others' in one of their own."""

    def __init__(self, settings: DumpSettings, world: World) -> None:
        self.settings = settings
        self._world = world
        self._owners: dict[Path, str] = {}

    def of_model(self, model_id: str) -> ModelDump:
        """Return the dump of a model."""
        return ModelDump(model_id, self)

    def prepared(self, model_id: str, step: int) -> Path:
        """Return the directory of a model's dump, on every rank; lines from ``step`` on are removed.

        Raises:
            DumpError: on every rank, if it cannot be used.
        """
        found = raise_on_all_ranks(
            self._world, lambda: self._claimed(model_id, step) if self._world.main else None
        )
        folder: Path = self._world.gather(found)[0]
        return folder

    @property
    def world(self) -> World:
        """The ranks."""
        return self._world

    def _claimed(self, model_id: str, step: int) -> Path:
        root = self.settings.folder
        own = root / re.sub(r"[^\w.-]", "_", model_id)
        for folder in (root, own):
            owner = self._owners.get(folder) or _owner(folder)
            if owner in (None, model_id):
                self._owners[folder] = model_id
                rewind(folder, step)
                return folder
        raise DumpError(
            f"{own} holds the dump of another model; delete it, or set {DIRECTORY} to another directory"
        )


class ModelDump:
    """Dump of one model, on one rank.

    Args:
        model_id: the model.
        dumps: what all models share.
    """

    def __init__(self, model_id: str, dumps: Dumps) -> None:
        self._id, self._dumps = model_id, dumps
        self._folder: Path | None = None
        self._asked = False

    def collector(self, step: int, *, asked: bool = False) -> Records | None:
        """Return what collects the records of a request at a step; None if it is not recorded.

        Args:
            asked: the request asks for its dump.
        """
        settings = self._dumps.settings
        self._asked |= asked
        if not asked and not (settings.enabled and step % settings.every == 0):
            return None
        return Records(settings.types)

    @property
    def asked(self) -> bool:
        """True if a request since the last step has asked for its dump."""
        return self._asked

    def stepped(self) -> None:
        """Begin the next step, whose requests are recorded if they ask for it again."""
        self._asked = False

    def rewind(self, step: int) -> None:
        """Remove what was dumped from a step on: the model has gone back to it."""
        folder, world = self._folder, self._dumps.world
        if folder is not None:
            raise_on_all_ranks(world, lambda: rewind(folder, step) if world.main else None)

    def write(self, records: Records | None, line: DumpedRequest) -> None:
        """Write a request's records on all ranks, then its line on the first; nothing in a service without dumps.

        Args:
            line: the request; ``parts`` are those of this rank, and ``types`` and ``folder`` are filled in.

        Raises:
            DumpError: on every rank, if one of them cannot write; there is no line then.
        """
        world = self._dumps.world
        if records is None and self._folder is None and not self._dumps.settings.enabled:
            return
        if self._folder is None:
            self._folder = self._dumps.prepared(self._id, line.step)
        folder = self._folder
        sub = FORWARD_ONLY if line.operation == Operation.FORWARD else ""
        written = [] if records is None else records.records
        raise_on_all_ranks(world, lambda: _write_files(folder / sub, written))
        parts = [part for own in world.gather(line.parts) for part in own]
        types = {name for own in world.gather([record.type for record in written]) for name in own}
        whole = replace(
            line, folder=sub, parts=tuple(parts), types=tuple(name for name in TYPES if name in types)
        )
        raise_on_all_ranks(world, lambda: _append(folder / INDEX, whole.line()) if world.main else None)


def _write_files(folder: Path, records: Sequence[Record]) -> None:
    pt = format_named("pt")
    for record in records:
        write_atomically(folder / record.type / f"{record.where.stem}.{pt.name}", pt.encode(record))
    for name in {record.type for record in records}:
        sync_folder(folder / name)


def _append(path: Path, line: bytes) -> None:
    """Append a line, or nothing of it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            end = file.tell()
            try:
                file.write(line)
                file.flush()
            except OSError:
                file.truncate(end)  # what follows must not continue half a line
                raise
    except OSError as error:
        raise unwritable(path, error) from error


def _owner(folder: Path) -> str | None:
    """Return the model whose dump lies in a directory; None if there is no dump, and so room for one.

    Raises:
        DumpError: if a dump of something else lies there.
    """
    if (folder / MANIFEST).exists():
        raise DumpError(
            f"{folder} holds the dump of a training run; delete it, or set {DIRECTORY} to another directory"
        )
    if not (folder / INDEX).exists():
        return None
    lines = read_requests(folder)
    return lines[0].model_id if lines else None


def rewind(folder: Path, step: int) -> None:
    """Remove lines and files of a model's dump from a step on, and a last line that was cut off."""
    if not (folder / INDEX).exists():
        return
    kept = [line for line in read_requests(folder) if line.step < step]
    write_atomically(folder / INDEX, [line.line() for line in kept])
    for sub in (folder, folder / FORWARD_ONLY):
        for name in TYPES:
            for path in (sub / name).glob("step_*.pt"):
                if int(path.stem.split("_")[1]) >= step:
                    path.unlink()


def parts_of(rank: int, first: int, samples: Sequence[Sequence[int]]) -> tuple[Part, ...]:
    """Return a rank's parts of a pass, whose first microbatch has the number ``first``."""
    return tuple(Part(rank, first + index, tuple(datums)) for index, datums in enumerate(samples))
