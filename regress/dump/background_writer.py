"""Background writer: one thread writes records within a memory budget."""

from __future__ import annotations

import threading
from collections import deque

from regress.dump.chunk_checksums import ChunkSums
from regress.dump.dump_files import Stamp, write_atomically
from regress.dump.dump_location import Location
from regress.dump.formats import Format
from regress.dump.record import Record
from regress.errors import DumpError

_BUDGET = 256 * 2**20


class Writer:
    """Encodes and writes records in order, off the caller's path.

    Attributes:
        stamps: path -> `Stamp` of each file written; complete after `close`. ``sums`` has the checksums of its chunks.
        failure: the first one, if any.

    The first failure stops all writing; it is raised by the next `put` and by `close`. At most `budget` bytes
    of tensors wait (or one record): beyond that `put` blocks. Without `fsync` a file is not forced to the disk.
    """

    def __init__(self, format: Format, budget: int = _BUDGET, *, fsync: bool = True) -> None:
        self.stamps: dict[Location, Stamp] = {}
        self.sums: dict[Location, str] = {}
        self._format = format
        self._budget = budget
        self._fsync = fsync
        self._queue: deque[tuple[Location, Record] | None] = deque()
        self._pending = 0
        self._jobs = 0
        self.failure: DumpError | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="regress-dump-writer", daemon=True)
        self._thread.start()

    def put(self, path: Location, record: Record) -> None:
        """Queue a record that nobody changes any more; raises the writer's first `DumpError`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pending or self._pending + record.nbytes <= self._budget)
            self.check()
            self._pending += record.nbytes
            self._jobs += 1
            self._queue.append((path, record))
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait until everything that was queued is written; raises the writer's first `DumpError`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs)
        self.check()

    def close(self) -> None:
        """Wait until everything is written; raises the writer's first `DumpError`."""
        with self._changed:
            self._queue.append(None)
            self._changed.notify_all()
        self._thread.join()
        self.check()

    def check(self) -> None:
        """Raise the writer's first `DumpError`, if there is one."""
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        while (job := self._next()) is not None:
            path, record = job
            if self.failure is None:
                self._write(path, record)
            with self._changed:
                self._pending -= record.nbytes
                self._jobs -= 1
                self._changed.notify_all()

    def _next(self) -> tuple[Location, Record] | None:
        with self._changed:
            self._changed.wait_for(lambda: len(self._queue) > 0)
            return self._queue.popleft()

    def _write(self, path: Location, record: Record) -> None:
        try:
            sums = ChunkSums()
            stamp = write_atomically(path, sums.passing(self._format.encode(record)), fsync=self._fsync)
            self.sums[path], self.stamps[path] = sums.text, stamp
        except DumpError as error:
            self.failure = error
        except Exception as error:  # every error here must reach the caller, not die with the thread
            self.failure = DumpError(f"{path} cannot be written as {self._format.name}: {error!r}")
            self.failure.__cause__ = error
