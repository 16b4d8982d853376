"""State that outlasts the process: sessions, models, saves, samplers and operations, in one SQLite file.

What `Ledger.write` has returned from outlasts the end of the process, with ``sync`` that of the machine, too. Sessions,
models, saves and samplers are held in memory as well; operations are looked up in the file.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from regress.errors import ConfigError, RegressError, reason
from regress.service.core.ledger_entries import (
    KINDS,
    Change,
    Entry,
    Lost,
    ModelEntry,
    OperationEntry,
    Point,
    Removed,
    SamplerEntry,
    SaveEntry,
    SessionEntry,
    as_text,
    read_entry,
)
from regress.service.service_api import ServiceError

FILE = "ledger.sqlite"
_TABLES = """
CREATE TABLE IF NOT EXISTS entry(
    position INTEGER PRIMARY KEY, kind TEXT NOT NULL, id TEXT NOT NULL, value TEXT NOT NULL, UNIQUE(kind, id));
CREATE TABLE IF NOT EXISTS operation(
    position INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, queue TEXT NOT NULL, kind TEXT NOT NULL, seq INTEGER,
    digest TEXT NOT NULL, mutates INTEGER NOT NULL, number INTEGER, ended INTEGER, ok INTEGER NOT NULL, error TEXT,
    result TEXT, creates INTEGER NOT NULL, forgotten INTEGER NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS by_seq ON operation(queue, seq);
CREATE INDEX IF NOT EXISTS by_number ON operation(queue, number) WHERE number IS NOT NULL;
CREATE INDEX IF NOT EXISTS creation ON operation(queue) WHERE creates;
CREATE INDEX IF NOT EXISTS under_way ON operation(position) WHERE ended IS NULL;
CREATE TRIGGER IF NOT EXISTS forget AFTER DELETE ON operation WHEN old.seq IS NOT NULL BEGIN
    UPDATE operation SET forgotten=max(forgotten, old.seq) WHERE queue=old.queue AND creates;
END;
"""
_OF_THE_DISK = {
    getattr(sqlite3, f"SQLITE_{name}") for name in ("CANTOPEN", "READONLY", "PERM", "IOERR", "FULL", "NOLFS")
}
_FIELDS = "id, queue, kind, seq, digest, mutates, number, ended, ok, error, result"


class Ledger:
    """Everything that outlasts the process. Whoever uses it holds the lock of the state.

    Args:
        path: the file, which one service has at a time.
        remembered: number of operations that are remembered, and of sessions that are finished and have no saves.

    Attributes:
        sessions, models, saves, samplers: entries by id, that which was written last at the end.
        ended: number of operations that have ended.

    Raises:
        ConfigError: if another service has the file, or it cannot be opened.
        ServiceError: if it is damaged.
    """

    def __init__(self, path: Path, remembered: int) -> None:
        self._path, self._remembered = path, remembered
        self.sessions: dict[str, SessionEntry] = {}
        self.models: dict[str, ModelEntry] = {}
        self.saves: dict[str, SaveEntry] = {}
        self.samplers: dict[str, SamplerEntry] = {}
        self.ended = 0
        try:
            self._file = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as error:
            raise self._unusable(error) from error
        try:
            self._open()
        except (sqlite3.Error, ValueError) as error:
            self._file.close()
            raise self._unusable(error) from error

    def _open(self) -> None:
        for pragma in ("locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=NORMAL"):
            self._file.execute(f"PRAGMA {pragma}")
        columns = [row[1] for row in self._file.execute("PRAGMA table_info(operation)")]
        renamed = "ALTER TABLE operation RENAME COLUMN lane TO queue;" if "lane" in columns else ""
        self._file.executescript(f"BEGIN EXCLUSIVE; {renamed} {_TABLES} COMMIT;")
        for kind, name in KINDS.items():
            rows = self._file.execute("SELECT value FROM entry WHERE kind=? ORDER BY position", (name,))
            entries = (read_entry(kind, json.loads(text)) for (text,) in rows)
            self._held(kind).update((entry.id, entry) for entry in entries)
        self.ended = self._file.execute("SELECT ifnull(max(ended), 0) FROM operation").fetchone()[0]

    def _unusable(self, error: Exception) -> RegressError:
        """Return the error of a file that cannot be opened."""
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return ConfigError(
                f"another service uses the state directory {self._path.parent}; end it, or choose another --state-dir"
            )
        if code in _OF_THE_DISK:
            return ConfigError(
                f"{self._path.parent} cannot be the state directory ({reason(error)}); choose another --state-dir"
            )
        return self._damaged(error)

    def _damaged(self, error: Exception) -> ServiceError:
        return ServiceError(
            f"""{self._path} is damaged ({reason(error)}); restore the file from a backup, or start the service with an
            empty --state-dir""",
            code="damaged_state",
            category="server",
        )

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        names = ("page_count", "page_size")
        pages, size = (self._file.execute(f"PRAGMA {name}").fetchone()[0] for name in names)
        return int(pages * size)

    @property
    def folders(self) -> set[str]:
        """Folders of saves that something may still be restored from."""
        found = {save.folder for save in self.saves.values()}
        for model in self.models.values():
            if not model.closed:
                found |= {point.folder for point in (model.point, model.origin) if isinstance(point, Point)}
        return found

    def write(self, *changes: Change, sync: bool = False) -> None:
        """Take changes in, all or none, and make them last; raises `ServiceError` if they cannot be written."""
        with self._transaction(sync):
            for change in changes:
                if isinstance(change, OperationEntry):
                    self._write_operation(change)
                elif isinstance(change, Lost):
                    self._fail(change)
                else:
                    self._write_entry(change)
        for change in changes:
            if isinstance(change, OperationEntry):
                self.ended = max(self.ended, change.ended or 0)
            elif not isinstance(change, Lost):
                entry = change.entry if isinstance(change, Removed) else change
                entries = self._held(type(entry))
                entries.pop(entry.id, None)
                if not isinstance(change, Removed):
                    entries[entry.id] = entry

    def operation(self, id: str) -> OperationEntry | None:
        """Return an operation that is remembered."""
        return next(self._operations("id=?", id), None)

    def creation(self, model_id: str) -> OperationEntry | None:
        """Return the operation that creates a model."""
        return next(self._operations("queue=? AND seq IS NULL AND kind='create_model'", model_id), None)

    def numbered(self, queue: str, number: int) -> OperationEntry | None:
        """Return the operation of a sampler's request of a number."""
        return next(self._operations("queue=? AND number=?", queue, number), None)

    def in_sequence(self, queue: str, seq: int) -> OperationEntry | None:
        """Return the operation that a sequence number of a model was spent on."""
        return next(self._operations("queue=? AND seq=?", queue, seq), None)

    def spent(self, queue: str) -> tuple[int, list[int]]:
        """Return the highest sequence number of a model that is forgotten, and those that are remembered."""
        forgotten = self._rows("SELECT forgotten FROM operation WHERE queue=? AND creates", queue)
        numbers = self._rows(
            "SELECT seq FROM operation WHERE queue=? AND seq IS NOT NULL ORDER BY seq", queue
        )
        return max((number for (number,) in forgotten), default=0), [number for (number,) in numbers]

    def under_way(self) -> list[OperationEntry]:
        """Return the operations that have not ended."""
        return [*self._operations("ended IS NULL")]

    def forgettable(self) -> list[Removed]:
        """Return the oldest finished sessions without saves beyond the limit, with all that belongs to them."""
        kept = {save.saved.model_id.partition(":")[0] for save in self.saves.values()}
        kept |= {model.session for model in self.models.values() if not model.closed}
        kept |= {entry.path.partition(":")[0] for entry in self.samplers.values() if entry.path is not None}
        finished = [entry for entry in self.sessions.values() if entry.finished]
        gone = {entry.id for entry in finished[: -self._remembered or None] if entry.id not in kept}
        found: list[Entry] = [self.sessions[id] for id in gone]
        found += [model for model in self.models.values() if model.session in gone]
        found += [sampler for sampler in self.samplers.values() if sampler.session in gone]
        return [Removed(entry) for entry in found]

    def close(self) -> None:
        """Close the file, which another service may use then."""
        self._file.close()

    def _held(self, kind: type[Any]) -> dict[str, Any]:
        entries: dict[str, Any] = getattr(self, f"{KINDS[kind]}s")
        return entries

    def _operations(self, where: str, *values: object) -> Iterator[OperationEntry]:
        names = _FIELDS.split(", ")
        for row in self._rows(f"SELECT {_FIELDS} FROM operation WHERE {where} ORDER BY position", *values):
            entry: dict[str, Any] = dict(zip(names, row, strict=True))
            try:
                for name in ("error", "result"):
                    entry[name] = None if entry[name] is None else json.loads(entry[name])
                yield read_entry(OperationEntry, entry)
            except (ValueError, TypeError) as error:
                raise self._damaged(error) from error

    def _rows(self, query: str, *values: object) -> list[Any]:
        try:
            return self._file.execute(query, values).fetchall()
        except (UnicodeEncodeError, OverflowError):  # text and numbers that no entry has
            return []
        except sqlite3.Error as error:
            raise self._damaged(error) from error

    def _write_operation(self, entry: OperationEntry) -> None:
        creates = entry.kind == "create_model" and entry.error is None
        texts = {name: as_text(getattr(entry, name)) for name in ("error", "result")}
        values = (*({**vars(entry), **texts}[name] for name in _FIELDS.split(", ")), creates)
        done = self._file.execute(
            f"INSERT INTO operation({_FIELDS}, creates) VALUES({', '.join('?' * len(values))}) "
            "ON CONFLICT(id) DO UPDATE SET ended=excluded.ended, ok=excluded.ok, error=excluded.error, "
            "result=excluded.result, creates=excluded.creates",
            values,
        )
        if entry.ended is None and done.lastrowid is not None:
            self._file.execute(
                "DELETE FROM operation WHERE position<=? AND ended IS NOT NULL AND NOT creates",
                (done.lastrowid - self._remembered,),
            )

    def _fail(self, lost: Lost) -> None:
        self._file.execute(
            "UPDATE operation SET ok=0, result=NULL, "
            "error=replace(?, '{operation}', kind || ifnull(' of seq_id ' || seq, '')) "
            "WHERE queue=? AND ended>? AND ok AND mutates",
            (as_text(lost.failure), lost.model.id, lost.model.since),
        )

    def _write_entry(self, change: Entry | Removed) -> None:
        entry = change.entry if isinstance(change, Removed) else change
        named = (KINDS[type(entry)], entry.id)
        if isinstance(change, Removed):
            self._file.execute("DELETE FROM entry WHERE kind=? AND id=?", named)
            return
        self._file.execute(
            "INSERT OR REPLACE INTO entry(kind, id, value) VALUES(?, ?, ?)", (*named, as_text(entry))
        )
        if isinstance(entry, ModelEntry) and entry.closed:  # its creation need not be remembered any longer
            self._file.execute("UPDATE operation SET creates=0 WHERE queue=? AND creates", (entry.id,))

    @contextmanager
    def _transaction(self, sync: bool) -> Iterator[None]:
        try:
            self._file.execute(f"PRAGMA synchronous={'FULL' if sync else 'NORMAL'}")
            self._file.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._file.execute("COMMIT")
            except BaseException:
                if self._file.in_transaction:
                    self._file.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in (
                sqlite3.SQLITE_CORRUPT,
                sqlite3.SQLITE_NOTADB,
            ):
                raise self._damaged(error) from error
            raise ServiceError(
                f"""the service cannot write its ledger ({reason(error)}); free space on its disk and send the request
                again""",
                code="storage",
                category="server",
                retryable=True,
            ) from error
