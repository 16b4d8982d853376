"""Sources of other systems: the readers of folders and files, and how they are registered.

A reader is an object with a name and two functions, in a file of its own::

    class MyReader:
        name = "mysystem"

        def matches(self, path: Location) -> bool:
            ...  # cheap: look at names, or at the first bytes; nothing is executed

        def open(self, path: Location) -> MySource:
            ...  # an object with the attributes and methods of `Source`

    READER = MyReader()

It is registered under the group `regress.plugins.SOURCES`.

A source gives records (`regress.dump.record.Record`) by name, with the type (`regress.dump.record_types`) and
coordinates of each: tensors of tokens with ``meta["layout"]`` (`TokenLayout.to_json()`) and ``meta["samples"]``, shards
with ``meta["shards"]``. Unknown facts become notes. Damaged files are a `DumpError` of one sentence. A source is opened
by its path alone, in each of the processes that share the work.

Dumps of our own are asked for first, bare files of tensors last.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from inspect import getattr_static
from typing import Any, Protocol

from regress.dump.chunk_checksums import Span
from regress.dump.coordinates import Coordinates
from regress.dump.dump_location import Location
from regress.dump.record import Record
from regress.errors import DumpError, reason
from regress.plugins import REPAIR, SOURCES, is_own, load, registered

LAST = "files"
"""Reader of any files of tensors, which is asked last."""


class Source(Protocol):
    """A source opened by a reader; a class of one may inherit what is said here of facts that nothing tells.

    Attributes:
        folder: the path it was opened with.
        system: name of the system, for people.
        mesh, config: extent of each dimension of the ranks, and configuration of the run, nested; empty where unknown.
        unsealed: True if its files carry nothing that their bytes could be verified by.
    """

    folder: Location
    system: str
    mesh: Mapping[str, int] = {}
    config: Mapping[str, Any] = {}
    unsealed: bool = False

    def __hash__(self) -> int:
        """Distinguish sources by identity."""
        return id(self)

    @property
    def precision(self) -> str | None:
        """Dtype that the model computed in, None where unknown."""
        return None

    @property
    def notes(self) -> Sequence[str]:
        """Unknown facts of the records read so far, a sentence each."""
        return ()

    @property
    @abstractmethod
    def entries(self) -> Mapping[str, tuple[str, Coordinates]]:
        """Name of each record -> its type and coordinates."""

    @abstractmethod
    def read(self, name: str) -> Record:
        """Read one record, its tensors perhaps memory-mapped; raise `DumpError` for a damaged one."""

    def raw(self, type: str, step: int) -> Mapping[str, Any] | None:
        """Return the content of the first file of a type that has no records; None if there is none."""
        return None

    def spans(self, name: str, tensors: Collection[str] | None = None) -> Sequence[Span] | None:
        """Return the parts of a record's file that `read` leaves to `verify`, or those of some tensors."""
        return None

    def verify(self, name: str, span: Span | None = None) -> None:
        """Raise `DumpError` if a record, or a part of its file, is not what was written, as far as can be known."""
        return

    def root(self, rank: int) -> int:
        """Return the rank whose tokens a rank repeats, which may be itself."""
        return rank

    @abstractmethod
    def writes(self, record_type: str, tensor: str | None = None) -> bool:
        """Return True if the system could have recorded a type, or a tensor of it."""


def spans_of(source: Source, name: str, tensors: Collection[str] | None = None) -> Sequence[Span]:
    """Return what `Source.spans` does; nothing for a source that does not inherit from it."""
    found = getattr(source, "spans", None)
    return () if found is None else found(name, tensors) or ()


def verify_span(source: Source, name: str, span: Span | None) -> None:
    """Verify a part of a file; of a source without parts the whole of it."""
    if span is None:
        source.verify(name)
    else:
        source.verify(name, span)


@dataclass(frozen=True)
class Reader:
    """A registered reader.

    Attributes:
        matches: True if a path is a source of the system.
        open: opens the source; raises `DumpError` for a damaged one.
    """

    name: str
    matches: Callable[[Location], bool]
    open: Callable[[Location], Source]


def open_source(path: Location) -> Source | None:
    """Open a path by the reader that knows it.

    Returns:
        The source, or None if no reader knows the path.

    Raises:
        DumpError: if the source is damaged, a reader is broken, or several know the path.
    """
    points = registered(SOURCES)
    found = [point for point in points.values() if point.name != LAST and _matches(point, path)]
    if len(found) > 1:
        names = " and ".join(_named(point) for point in found)
        raise DumpError(f"{path} is claimed by {names}: uninstall one of them, or correct its matches()")
    if not found and _matches(points[LAST], path):
        found = [points[LAST]]
    for point in found:
        source = _guarded(point, "open", path)
        missing = [name for name in _PARTS if getattr_static(source, name, _PARTS) is _PARTS]
        if missing:
            raise DumpError(f"{_named(point)} opens {path} as something without {missing[0]}: {REPAIR}")
        opened: Source = source
        return opened
    return None


_PARTS = (
    *("folder", "system", "mesh", "config", "precision", "notes", "entries"),
    *("read", "raw", "verify", "root", "writes"),
)


def _matches(point: EntryPoint, path: Location) -> bool:
    return bool(_guarded(point, "matches", path))


def _guarded(point: EntryPoint, name: str, path: Location) -> Any:
    """Call a reader; any error of another package's reader becomes a sentence that names it."""
    try:
        return getattr(load(point), name)(path)
    except DumpError:
        raise
    except Exception as error:
        if is_own(point):
            raise
        raise DumpError(f"{_named(point)} failed in {name}({path}) ({reason(error)}): {REPAIR}") from error


def _named(point: EntryPoint) -> str:
    return f"the reader {point.name!r} ({point.value})"
