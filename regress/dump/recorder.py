"""Recorder: filters taps, collects the tensors of each record, and completes the dump."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from regress.dump.background_writer import Writer
from regress.dump.canonical_json import Json
from regress.dump.coordinates import Coordinates
from regress.dump.dump_continuation import ContinuationPoint, Position, StartingPlace, continued
from regress.dump.dump_files import TEMPORARY, probe, unwritable
from regress.dump.dump_location import Location, location
from regress.dump.dump_manifest import MANIFEST, Entry, Manifest, Provenance, write_manifest
from regress.dump.dump_reader import files_within, is_dump_file
from regress.dump.formats import format_named
from regress.dump.record import Record
from regress.dump.record_types import FOLDERS, type_index
from regress.errors import DumpError

T = TypeVar("T")

_GATHER = (
    "ranks that record one run into one directory give rank= and gather= (torch.distributed.all_gather_object), "
    "others a directory each"
)


class Collector:
    """Collects the tensors of taps into whole records.

    Args:
        options: record type -> whether it is recorded; types left out are not.
        every_n_steps: steps whose number divides by it are recorded.
    """

    def __init__(self, options: Mapping[str, bool], every_n_steps: int = 1) -> None:
        self._every = every_n_steps
        self._types = {name for name, enabled in options.items() if type_index(name) >= 0 and enabled}
        self._pending: dict[tuple[str, Coordinates], Record] = {}
        self._lock = threading.Lock()

    @property
    def failure(self) -> DumpError | None:
        """First failure to record so far."""
        return None

    def check(self) -> None:
        """Raise `failure` where a tap may; not among several ranks, where all meet later."""

    def put(self, record: Record, folder: str | None = None) -> None:
        """Take one whole record, for `folder` (one of `FOLDERS`; default: its type)."""
        raise NotImplementedError

    def wanted(self, type: str, step: int) -> bool:
        """Return True if records of this type are kept at this step; raises `DumpError` for a type that
        does not exist.
        """
        if type not in self._types:
            type_index(type)  # an unknown type is a mistake, not an unwanted type
            return False
        return step % self._every == 0

    def add(
        self, type: str, where: Coordinates, tensors: Mapping[str, Any], meta: Mapping[str, Any] | None = None
    ) -> None:
        """Copy tensors into the record of `type` at `where`; several calls make one record.

        Raises `DumpError` when a tensor is there already, when metadata contradicts what is there, and for an
        earlier failure of the writer.
        """
        self.check()
        new = Record.of(type, where, tensors, meta)
        with self._lock:
            old = self._pending.setdefault((type, where), new)
            if old is new:
                return
            _refuse_twice(old, new)
            old.tensors |= new.tensors
            for key, value in new.meta.items():
                known = old.meta.get(key)
                old.meta[key] = (
                    {**known, **value} if isinstance(known, dict) and isinstance(value, dict) else value
                )

    def flush(self, where: Coordinates | None = None) -> None:
        """Pass the records at `where` (None: all) to the writer; raises the writer's first `DumpError`."""
        with self._lock:
            keys = [key for key in self._pending if where is None or key[1] == where]
            records = [self._pending.pop(key) for key in keys]
        for record in records:
            self.put(record)


class Recorder(Collector):
    """Records one run into one directory.

    Args:
        dump_dir: a folder, created if missing, or the URL of one in a store (`s3://bucket/run`); must hold no dump
            yet, complete or not: two runs never mix.
        format: safetensors, pt or jsonl.
        every_n_steps: steps whose number divides by it are recorded.
        options: record type -> whether it is recorded; types left out are not.
        provenance: provenance of the run for the manifest.
        overwrite: remove an earlier dump (its manifest, its record files, nothing else) instead of refusing.
        overwrite_key: setting by which a user asks for overwriting, for the refusal.
        start: continue an earlier dump at this place: its records before it are kept, all others are removed.
        rank: number of this process among those that record one run into this directory.
        gather: hands the value of every rank to all of them, in their order. Rank 0 prepares the directory, and
            writes the manifest once all have written their records. A writer that fails on one of several ranks
            interrupts nothing (the others would wait): look at `failure` where all ranks meet.
        fsync: force every file to the disk, so that what is written outlasts a power failure.

    Raises `DumpError` at once for an unknown format or type, a rank without `gather`, or a directory in use or not
    writable.
    """

    def __init__(
        self,
        dump_dir: str | Location,
        *,
        options: Mapping[str, bool],
        format: str = "safetensors",
        every_n_steps: int = 1,
        provenance: Provenance | None = None,
        overwrite: bool = False,
        overwrite_key: str = "overwrite=True",
        start: StartingPlace | None = None,
        rank: int = 0,
        gather: Callable[[Any], list[Any]] = lambda value: [value],
        fsync: bool = True,
    ) -> None:
        if not isinstance(options, Mapping):
            raise DumpError(
                f"options={options!r} is not a choice of records: give a dict such as {{'forward_data': True}}"
            )
        if isinstance(every_n_steps, bool) or not isinstance(every_n_steps, int) or every_n_steps < 1:
            raise DumpError(
                f"dump_every_n_steps is {every_n_steps!r}, but steps are counted from 1: give 1 or more"
            )
        if not isinstance(dump_dir, str | os.PathLike) and not hasattr(dump_dir, "iterdir"):
            raise DumpError(f"dump directory {dump_dir!r} is not a path: give that of a folder")
        self.folder = location(
            dump_dir
            if isinstance(dump_dir, Path) or not isinstance(dump_dir, os.PathLike)
            else Path(dump_dir)
        )
        super().__init__(options, every_n_steps)
        self._format = format_named(format)
        self._provenance = provenance or Provenance()
        self._entries: dict[Location, tuple[str, Coordinates]] = {}
        self._rank = rank
        self._gather = gather
        self._kept: dict[str, Entry] = {}
        prepared = self._together(
            lambda: self._prepared(overwrite, overwrite_key, start) if rank == 0 else None
        )
        self._alone = len(prepared) == 1
        if self._alone and rank != 0:
            raise DumpError(f"rank {rank} would record into {self.folder} without rank 0: {_GATHER}")
        self._writer = Writer(self._format, fsync=fsync)

    def _prepared(self, overwrite: bool, overwrite_key: str, start: StartingPlace | None) -> None:
        if start is None:
            _prepare(self.folder, overwrite, overwrite_key)
            return
        self._kept = continued(self.folder, self._format, start)

    @property
    def failure(self) -> DumpError | None:
        """First failure of the writer so far."""
        return self._writer.failure

    def check(self) -> None:
        """Raise the writer's first failure, unless other ranks would wait."""
        if self._alone:
            self._writer.check()

    def written(self) -> dict[Location, int]:
        """Return the size in bytes of every file that this process has written so far."""
        return {path: stamp.size for path, stamp in list(self._writer.stamps.items())}

    def put(self, record: Record, folder: str | None = None) -> None:
        """Pass one whole record to the writer, into `folder` (one of `FOLDERS`; default: its type).

        Raises `DumpError` when a record of the same file name was written before.
        """
        if folder is not None and folder not in FOLDERS:
            raise DumpError(f"a dump has no folder {folder!r}: choose one of {', '.join(FOLDERS)}")
        path = self.folder / (folder or record.type) / f"{record.where.stem}.{self._format.name}"
        with self._lock:
            if path in self._entries:
                raise DumpError(f"""{path} would be written twice: tap all values of one record before leaving its
                coordinates, and number the optimizer updates of a step with at(update=...)""")
            self._entries[path] = (record.type, record.where)
        if self._alone or self.failure is None:
            self._writer.put(path, record)

    def position(self, place: ContinuationPoint) -> Position:
        """Return which records before a place are written, after waiting for those on their way; ranks together.

        Raises `DumpError` if one cannot be written.
        """
        return functools.reduce(Position.joined, self._together(lambda: self._written(place)))

    def _written(self, place: ContinuationPoint) -> Position:
        self._writer.drain()
        found = {name: entry.stamp for name, entry in self._kept.items()}
        for path, stamp in self._writer.stamps.items():
            if place.keeps(path.parent.name, self._entries[path][1]):
                found[f"{path.parent.name}/{path.name}"] = stamp
        return Position.of(found)

    def close(self, complete: bool = True) -> None:
        """Write pending records and, if the run is `complete`, the manifest; raises the first `DumpError`."""
        if not complete:
            self._finish()
            return
        parts = self._together(self._finish)
        if self._rank == 0:
            files = {**self._kept, **{name: entry for part in parts for name, entry in part.items()}}
            _refuse_others(self.folder, files)
            write_manifest(self.folder, Manifest(self._provenance, self._format.name, files))

    def _finish(self) -> dict[str, Entry]:
        """Write pending records; return the files of this process."""
        try:
            self.flush()
        finally:
            self._writer.close()
        stamps, sums = self._writer.stamps, self._writer.sums
        return {
            f"{path.parent.name}/{path.name}": Entry(type, where, stamps[path], sums[path])
            for path, (type, where) in self._entries.items()
        }

    def _together(self, work: Callable[[], T]) -> list[T]:
        """Return the result of every rank's work; raises `DumpError` on all of them if it failed on one."""
        own: T | None = None
        failure: DumpError | None = None
        try:
            own = work()
        except DumpError as error:
            failure = error
        found = self._gather((own, failure and str(failure)))
        first = next((problem for _, problem in found if problem is not None), None)
        if first is None:
            return [value for value, _ in found]
        if failure is not None and str(failure) == first:
            raise failure  # which knows its cause
        raise DumpError(first)


def _refuse_others(folder: Location, files: Collection[str]) -> None:
    """Refuse to complete a dump that another recorder has written into."""
    found = {f"{path.parent.name}/{path.name}" for path in files_within(folder) if is_dump_file(path)}
    if others := sorted(found - set(files)):
        raise DumpError(f"another recorder has written into {folder} ({others[0]}), too: {_GATHER}")


def _refuse_twice(old: Record, new: Record) -> None:
    for name in new.tensors.keys() & old.tensors.keys():
        raise DumpError(f"""tensor {name!r} was tapped twice for {old.type} at {old.where.stem}: give it another name,
        or say with at(micro=...) or at(update=...) how the two differ""")
    for key in new.meta.keys() & old.meta.keys():
        if _contradicts(old.meta[key], new.meta[key]):
            raise DumpError(
                f"meta {key!r} was tapped with two values for {old.type} at {old.where.stem}: use two names"
            )


def _contradicts(old: Json, new: Json) -> bool:
    """Return True if two values contradict each other; mappings only where both have a key."""
    if isinstance(old, dict) and isinstance(new, dict):
        return any(old[key] != new[key] for key in old.keys() & new.keys())
    return old != new


def _prepare(folder: Location, overwrite: bool, overwrite_key: str) -> None:
    """Refuse or remove an earlier dump, and check that the folder can be written."""
    try:
        below = files_within(folder)
        earlier = [path for path in below if is_dump_file(path)]
        earlier += [path for path in (folder / MANIFEST,) if path.exists()]
        if earlier and not overwrite:
            raise DumpError(f"""{folder} already holds a dump ({_within(folder, earlier[0])}), and runs must not mix:
            choose another dump directory, delete this one, or ask for overwriting ({overwrite_key})""")
        leftovers = [path for path in below if path.name.startswith(TEMPORARY)]
        for path in (*reversed(earlier), *leftovers):  # manifest first: half a dump must not look complete
            path.unlink()
        probe(folder)
    except OSError as error:
        raise unwritable(folder, error) from error


def _within(folder: Location, path: Location) -> str:
    return str(path).removeprefix(f"{folder}/")
