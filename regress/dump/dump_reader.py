"""Reading dumps: a single file, or a verified directory in the order of computation."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from regress.dump.chunk_checksums import CHUNK, Span, damaged_chunk
from regress.dump.coordinates import Coordinates, dataflow_key, parse_stem
from regress.dump.dump_files import Stamp, file_stamp, stamp_of, unreadable
from regress.dump.dump_location import Location, children, location, read_bytes
from regress.dump.dump_manifest import MANIFEST, Entry, read_manifest
from regress.dump.file_damage import CUT_OFF, Damage
from regress.dump.formats import FORMATS, Format, format_named, safetensors_format
from regress.dump.mapped_arrays import map_file
from regress.dump.record import Record
from regress.dump.record_types import FOLDERS
from regress.errors import DumpError

_PART = 64 * CHUNK


def read(path: str | Location, format: str = "auto") -> Record:
    """Return the one record of a file; see `read_all`."""
    records = read_all(path, format)
    if len(records) != 1:
        raise DumpError(
            f"{path} holds {len(records)} records, but one was asked for: read them with read_all"
        )
    return records[0]


def read_all(path: str | Location, format: str = "auto") -> list[Record]:
    """Return the records of a file (several only in jsonl), with the format found from the content.

    Raises `DumpError` naming the file when it is missing, damaged, of another format than `format` (if that
    is not "auto"), or holds code; nothing in the file is ever executed.
    """
    file = location(path)
    return _decode(file, _load(file), format)


def detect_format(data: bytes) -> Format | None:
    """Return the format of `data`, judged by its first bytes; None if it is none of them."""
    for found in FORMATS.values():
        if found.matches(data):
            return found
    return None


def is_dump_file(path: Location) -> bool:
    """Return True if a file is named like a record."""
    return path.suffix.removeprefix(".") in FORMATS and parse_stem(path.stem) is not None


def files_within(folder: Location, names: Collection[str] = FOLDERS) -> list[Location]:
    """Return the files in the sub-folders of a dump directory, records or not; `names` are those of the
    sub-folders.
    """
    return [path for below in children(folder) if below.name in names for path in children(below)]


def _load(path: Location) -> bytes:
    try:
        return read_bytes(path)
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Location, error: OSError) -> DumpError:
    if isinstance(error, FileNotFoundError):
        return DumpError(f"{path} does not exist: check the path, or record this step first")
    return unreadable(path, error)


def _decode(path: Location, data: bytes, format: str) -> list[Record]:
    found = detect_format(data)
    if found is None:
        state = "is empty" if not data else f"begins like no dump format ({', '.join(FORMATS)})"
        raise DumpError(f"{path} {state}; {CUT_OFF}")
    if format != "auto" and format_named(format) is not found:
        raise DumpError(
            f"{path} is a {found.name} file, not {format}: set the format to {found.name} or auto"
        )
    with _damage_named(path, found.name):
        return found.decode(data)


@contextmanager
def _damage_named(path: Location, format: str) -> Iterator[None]:
    """Turn every error of a decoder into one that names the file."""
    try:
        yield
    except Damage as damage:
        raise DumpError(f"{path} is not an intact {format} record: {damage}; {damage.remedy}") from None
    except DumpError as error:
        raise DumpError(f"{path} cannot be used: {error}") from None
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise DumpError(f"{path} is not an intact {format} record ({error}); {CUT_OFF}") from None


class DumpReader:
    """Reader of a complete dump directory.

    Attributes:
        folder: the directory.
        manifest: its verified manifest.
        mapped: True if records are parts of mapped files.

    Opening compares the record files on disk (all, or those of the sub-folder `only`) with the manifest
    and raises `DumpError` for missing or additional ones; reading a file verifies its hash.

    With `mapped`, the tensors of local safetensors files are read-only parts of the mapped files, read on
    first access. Reading such a record verifies size and description, and `verify` the bytes. Other formats and
    remote files are read as without `mapped`.
    """

    def __init__(self, path: str | Location, only: str | None = None, *, mapped: bool = False) -> None:
        self.folder = location(path)
        self.manifest = read_manifest(self.folder)
        local = isinstance(self.folder, Path) and self.manifest.format == safetensors_format.NAME
        self.mapped = mapped and local
        listed = {
            name for name in self.manifest.files if only is None or Path(name).parent.as_posix() == only
        }
        found = {
            f"{file.parent.name}/{file.name}"
            for file in files_within(self.folder, FOLDERS if only is None else {only} & {*FOLDERS})
            if is_dump_file(file)
        }
        self._report("lacks", listed - found, "they were deleted or not copied: copy the dump again")
        self._report("has additional", found - listed, "they are not of this run: move them away")
        entries = {name: self.manifest.files[name] for name in listed}
        names = sorted(entries, key=lambda n: (dataflow_key(entries[n].type, entries[n].where), n))
        self._entries = {name: entries[name] for name in names}

    def _report(self, verb: str, names: set[str], advice: str) -> None:
        if names:
            some = ", ".join(sorted(names)[:3]) + (" ..." if len(names) > 3 else "")
            raise DumpError(
                f"{self.folder} {verb} {len(names)} record file{'s' * (len(names) > 1)} ({some}); {advice}"
            )

    @property
    def entries(self) -> Mapping[str, tuple[str, Coordinates]]:
        """Relative file name -> type and coordinates of its record, in the order of computation."""
        return {name: (entry.type, entry.where) for name, entry in self._entries.items()}

    @property
    def config(self) -> Mapping[str, Any]:
        """Configuration of the run, nested, as the manifest tells it."""
        return self.manifest.provenance.config

    def names(self, type: str | None = None, step: int | None = None) -> list[str]:
        """Return relative file names in the order of computation, of one type and step or of all."""
        return [
            name
            for name, entry in self._entries.items()
            if type in (None, entry.type) and step in (None, entry.where.step)
        ]

    def records(self, type: str | None = None, step: int | None = None) -> Iterator[Record]:
        """Read records in the order of computation."""
        return map(self.read, self.names(type, step))

    __iter__ = records

    def read(self, name: str) -> Record:
        """Read one file by its relative name; raises `DumpError` if it is not what was recorded."""
        path, entry = self._file(name)
        if self.mapped and isinstance(path, Path):
            return _checked_against_manifest(path, entry, _mapped(path, entry))
        data = _load(path)
        _require(path, entry, stamp_of(data))
        records = _decode(path, data, self.manifest.format)
        if len(records) != 1:
            raise DumpError(f"{path} holds {len(records)} records, but a file of a dump holds one; {CUT_OFF}")
        return _checked_against_manifest(path, entry, records[0])

    def verify(self, name: str, span: Span | None = None) -> None:
        """Raise `DumpError` unless a file has the checksums, or else the hash, that stand in the manifest.

        Args:
            span: part of the file whose chunks are read; by default all of it. A file of an earlier release is read as
                a whole.
        """
        path, entry = self._file(name)
        if not entry.sums:
            _require(
                path,
                entry,
                file_stamp(path, entry.stamp.size) if isinstance(path, Path) else stamp_of(_load(path)),
            )
            return
        try:
            found = damaged_chunk(path, entry.sums, entry.stamp.size, None if span is None else [span])
        except OSError as error:
            raise unreadable(path, error) from error
        if found is not None:
            raise DumpError(f"""{path} has {found[1] - found[0]} bytes from {found[0]} on that do not match the size and
            hash in {MANIFEST}; {CUT_OFF}""")

    def spans(self, name: str, tensors: Collection[str] | None = None) -> list[Span]:
        """Return the parts of a file that hold its description and its tensors, or some of them, for `verify`."""
        path, entry = self._file(name)
        whole = (0, entry.stamp.size)
        if not entry.sums:
            return [whole]
        found = [whole]
        if tensors is not None and isinstance(path, Path) and self.manifest.format == safetensors_format.NAME:
            with _damage_named(path, safetensors_format.NAME):
                found = safetensors_format.spans(map_file(path).data, tensors)
        return [
            (begin, min(begin + _PART, stop)) for start, stop in found for begin in range(start, stop, _PART)
        ]

    def _file(self, name: str) -> tuple[Location, Entry]:
        if name not in self._entries:
            raise DumpError(f"{self.folder} has no file {name!r}: choose one that names() lists")
        return self.folder / name, self._entries[name]


def _checked_against_manifest(path: Location, entry: Entry, record: Record) -> Record:
    """Return a record that is of the type and place that the manifest tells."""
    if (record.type, record.where.stem) != (entry.type, entry.where.stem):
        raise DumpError(
            f"{path} holds {record.type} of {record.where.stem}, which {MANIFEST} does not say; {CUT_OFF}"
        )
    return record


def _mapped(path: Path, entry: Entry) -> Record:
    data = map_file(path)
    if data.size != entry.stamp.size:
        raise DumpError(
            f"{path} has {data.size} bytes, but {MANIFEST} tells of {entry.stamp.size}; {CUT_OFF}"
        )
    with _damage_named(path, safetensors_format.NAME):
        return safetensors_format.view(data.data)


def _require(path: Location, entry: Entry, found: Stamp) -> None:
    if found != entry.stamp:
        raise DumpError(
            f"{path} has {found.size} bytes that do not match the size and hash in {MANIFEST}; {CUT_OFF}"
        )
