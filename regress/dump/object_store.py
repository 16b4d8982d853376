"""Files of an object store, with pathlib's method names. Storage itself is left to fsspec.

A file is uploaded whole, so that the store holds either all of it or its earlier content; retries are left to
the file system behind the URL (s3fs, gcsfs, adlfs, ...), which is configured as fsspec is: by the environment
and by `~/.config/fsspec`.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from queue import Empty, Queue
from typing import Any

from fsspec.core import url_to_fs

from regress.credential_redaction import redacted_url
from regress.errors import DumpError, reason

_PATH = r"[^@:?#;]+(:\d+)?(/[^?#;]*)?"
_NAMELESS = re.compile(_PATH)
_NAMED = re.compile(rf"[\w.-]+@{_PATH}")
PATIENCE = "REGRESS_STORE_TIMEOUT"
"""Environment variable: seconds within which a store has to answer, beside the time that the bytes take."""
_PATIENCE, _SLOWEST = 60.0, 100_000  # seconds; bytes in a second
_WITH_NAMES = ("abfs", "abfss", "ftp", "hdfs", "sftp", "smb", "ssh", "wasb", "wasbs", "webhdfs")
"""Protocols whose URLs name a user or a container before an ``@``."""


@dataclass(frozen=True, repr=False)
class RemotePath:
    """File or folder of a store, with the part of `pathlib.Path` that dumps need.

    Attributes:
        url: its address, credentials included; `str` leaves them out.
        files: the fsspec file system it belongs to.
        path: its name there.
        entry: result of a listing.

    Reading raises `FileNotFoundError` for a missing file; any other refusal of a store is a `DumpError`.
    """

    url: str
    files: Any = field(compare=False)
    path: str = field(compare=False)
    entry: Mapping[str, Any] | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return redacted_url(self.url)

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}", self.files, f"{self.path}/{name}")

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self._pure.name

    @property
    def stem(self) -> str:
        """Last part without its suffix."""
        return self._pure.stem

    @property
    def suffix(self) -> str:
        """Suffix, such as `.pt`."""
        return self._pure.suffix

    @property
    def parent(self) -> RemotePath:
        """Parent folder; a bucket is its own parent."""
        above, _, name = self.url.rpartition("/")
        if above.endswith(("/", ":")):
            return self
        return RemotePath(above, self.files, self.path.removesuffix(f"/{name}"))

    @property
    def size(self) -> int:
        """Size in bytes."""
        entry = self.entry or self._info()
        return int((entry or {}).get("size") or 0)

    @property
    def _pure(self) -> PurePosixPath:
        return PurePosixPath(self.url.partition("://")[2])

    def absolute(self) -> RemotePath:
        """Return the path itself."""
        return self

    def exists(self) -> bool:
        """Return True for a file, or a folder with something in it."""
        return self._info() is not None

    def is_dir(self) -> bool:
        """Return True for a folder with something in it."""
        entry = self.entry or self._info()
        return entry is not None and entry["type"] == "directory"

    def is_file(self) -> bool:
        """Return True for a file."""
        entry = self.entry or self._info()
        return entry is not None and entry["type"] == "file"

    def iterdir(self) -> Iterator[RemotePath]:
        """Yield the direct children of this folder, at this moment."""
        with self._answers("listed", missing_ok=True):
            self.files.invalidate_cache(self.path)  # other ranks write, too
            found = self._call("ls", self.path, detail=True)
        for entry in found:
            path = str(entry["name"]).rstrip("/")
            if path.strip("/") != self.path.strip("/"):  # markers that web consoles leave for empty folders
                name = path.rpartition("/")[2]
                yield RemotePath(f"{self.url}/{name}", self.files, f"{self.path}/{name}", entry)

    def read_bytes(self) -> bytes:
        """Return the whole file, downloaded once."""
        with self._answers("read", missing_ok=True):
            return bytes(self._call("cat_file", self.path, size=self.size))

    def read_start(self, count: int) -> bytes:
        """Return the first bytes of the file, at most so many."""
        with self._answers("read", missing_ok=True):
            return bytes(self._call("cat_file", self.path, start=0, end=count, size=count))

    def write_bytes(self, data: bytes) -> None:
        """Upload a whole file.

        Parent folders are created where the store has folders; a bucket never is.
        """
        with self._answers("written"):
            try:
                self._call("pipe_file", self.path, data, size=len(data))
            except FileNotFoundError:
                self.parent._make()
                self._call("pipe_file", self.path, data, size=len(data))

    def unlink(self) -> None:
        """Remove a file."""
        with self._answers("removed"):
            self._call("rm_file", self.path)

    def rmtree(self) -> None:
        """Remove a folder with all that it holds; a missing one is not an error."""
        with self._answers("removed"), suppress(FileNotFoundError):
            self.files.invalidate_cache(self.path)
            self._call("rm", self.path, recursive=True)

    def _make(self) -> None:
        """Create this folder and its parents; a store without folders only checks that the bucket exists."""
        if self.parent == self:
            raise FileNotFoundError(self.path)
        with suppress(FileExistsError):
            try:
                self._call("mkdir", self.path, create_parents=False)
            except FileNotFoundError:
                self.parent._make()
                self._call("mkdir", self.path, create_parents=False)

    def _info(self) -> Mapping[str, Any] | None:
        try:
            with self._answers("read", missing_ok=True):
                self.files.invalidate_cache(self.path)
                found: Mapping[str, Any] = self._call("info", self.path)
                return found
        except FileNotFoundError:
            return None

    def _call(self, method: str, *arguments: Any, size: int = 0, **options: Any) -> Any:
        """Call the file system, and wait no longer than a store takes that answers at all.

        Args:
            size: bytes that are transferred, as far as known.

        Raises:
            TimeoutError: if there is no answer by then.
        """
        patience = _patience() + size / _SLOWEST
        answer: Queue[tuple[Any, BaseException | None]] = Queue()

        def ask() -> None:
            try:
                answer.put((getattr(self.files, method)(*arguments, **options), None))
            except BaseException as error:
                answer.put((None, error))

        threading.Thread(target=ask, name="regress-store", daemon=True).start()
        try:
            found, error = answer.get(timeout=patience)
        except Empty:
            raise TimeoutError(f"no answer within {patience:.0f} s") from None
        if error is not None:
            raise error
        return found

    @contextmanager
    def _answers(self, verb: str, missing_ok: bool = False) -> Iterator[None]:
        """Turn a store's errors, different for each store, into one sentence."""
        try:
            yield
        except Exception as error:
            if missing_ok and isinstance(error, FileNotFoundError):
                raise
            raise DumpError(f"{self} cannot be {verb} ({reason(error)}): {_remedy(error)}") from error


def _patience() -> float:
    """Return the seconds that a store has for an answer; raises `DumpError` if the variable holds no such number."""
    text = os.environ.get(PATIENCE, "")
    try:
        found = float(text or _PATIENCE)
        if 0 < found < 1e6:
            return found
    except ValueError:
        pass
    raise DumpError(f"{PATIENCE}={text!r} is not a number of seconds: set it to one above 0, such as 60")


def _remedy(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"see that the store can be reached, or set {PATIENCE} to more seconds"
    if isinstance(error, FileNotFoundError):
        return "there is no such bucket or folder; create it, or correct the URL"
    if isinstance(error, PermissionError):
        return "give this process credentials that may do so, or choose another dump directory"
    if isinstance(error, FileExistsError | NotADirectoryError | IsADirectoryError):
        return "a file stands where a folder is needed, or the other way round; choose another dump directory"
    if isinstance(error, NotImplementedError):
        return "its file system cannot do this; choose another store"
    return "see that the store can be reached and accepts your credentials, then try again"


def open_url(url: str) -> RemotePath:
    """Return the location that a URL names, such as `s3://bucket/run`, without contacting the store.

    Raises `DumpError` if this installation does not speak its protocol, or if it names no single place.
    """
    protocol, _, rest = url.partition("://")
    shown = redacted_url(url)
    if "::" in url:
        raise DumpError(
            f"{shown} chains several file systems, but a dump lies in one: give the URL of the store"
        )
    if not rest.strip("/"):
        raise DumpError(
            f"{shown} names no place in the store: add a bucket or a folder, such as {protocol}://run"
        )
    harmless = _NAMED if protocol.lower() in _WITH_NAMES else _NAMELESS
    if shown != url and not harmless.fullmatch(rest) and not _NAMELESS.fullmatch(rest):
        raise DumpError(f"""{shown} holds a password or a signature, which manifests and logs would repeat: give it in
        the environment or in ~/.config/fsspec""")
    url = url.rstrip("/")
    try:
        files, path = url_to_fs(url)
    except ImportError as error:
        why = f"{error}; {error.__cause__}" if error.__cause__ is not None else str(error)
        raise DumpError(
            f"{shown} cannot be opened ({why}): install the package that the protocol {protocol} needs"
        ) from error
    except Exception as error:
        raise DumpError(f"""{shown} cannot be opened ({reason(error)}): correct the protocol {protocol}, or its
        configuration in the environment and ~/.config/fsspec""") from error
    return RemotePath(url, files, path.rstrip("/"))
