"""Journal of a service: one JSON object a line, appended before a client hears of it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from regress.dump.files import sync_folder, write_atomically
from regress.errors import reason
from regress.inputs import parse_json, read_bytes
from regress.service.api import ServiceError

Record = dict[str, Any]


class Journal:
    """File to which records are appended.

    A record that `append` has returned from outlasts the end of the process, with ``sync`` that of the machine, too.

    Args:
        path: the file, which is created if it does not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self._size = os.fstat(self._handle).st_size

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return self._size

    def append(self, *records: Record, sync: bool = False) -> None:
        """Append records.

        Raises:
            ServiceError: if they cannot be written; the journal is then as before.
        """
        lines = b"".join(_line(record) for record in records)
        try:
            rest = memoryview(lines)
            while rest:
                rest = rest[os.write(self._handle, rest) :]
            if sync:
                os.fsync(self._handle)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle, self._size)
            raise ServiceError(
                f"the service cannot write its journal ({reason(error)}); free space on its disk and send the request "
                "again",
                code="storage",
                category="server",
                retryable=True,
            ) from error
        self._size += len(lines)

    def replace(self, records: Iterable[Record]) -> None:
        """Write other records in place of all; a kill leaves the old ones or the new ones."""
        write_atomically(self._path, [b"".join(_line(record) for record in records)])
        sync_folder(self._path.parent)
        os.close(self._handle)
        self._handle = os.open(self._path, os.O_RDWR | os.O_APPEND)
        self._size = os.fstat(self._handle).st_size

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)


def _line(record: Record) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def read_journal(path: Path) -> list[Record]:
    """Return the records of a journal; a last line that was not written to its end is none.

    Raises:
        ServiceError: if another line cannot be read.
    """
    try:
        lines = read_bytes(path).split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ServiceError(
            f"{path} cannot be read ({reason(error)}); correct its permissions, or start the service with an empty "
            "--state-dir",
            code="damaged_state",
            category="server",
        ) from error
    records: list[Record] = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            record = parse_json(line, finite=False, wide=True)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise damaged(path, number)
        records.append(record)
    return records


def damaged(path: Path, number: int) -> ServiceError:
    """Return the error for a line of a journal that says nothing, or what cannot be."""
    return ServiceError(
        f"line {number} of {path} is damaged; restore the file from a backup, or start the service with an empty "
        "--state-dir",
        code="damaged_state",
        category="server",
    )
