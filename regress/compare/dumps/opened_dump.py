"""A dump opened for a comparison, whatever system wrote it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar, cast
from weakref import ref

from regress.compare.dumps.golden_source import PREFIX as GOLDEN
from regress.compare.dumps.golden_source import GoldenSide, is_golden
from regress.compare.dumps.rank_averaged_loss import PREFIX as AVERAGED
from regress.compare.dumps.rank_averaged_loss import AveragedSide, is_averaged
from regress.compare.dumps.wire_view import WireView, flags_of, is_sent
from regress.dump.chunk_checksums import Span
from regress.dump.coordinates import Coordinates
from regress.dump.dump_location import Location, location
from regress.dump.dump_manifest import MANIFEST, dump_inside, no_folder
from regress.dump.dump_reader import DumpReader
from regress.dump.numpy_arrays import DTYPES
from regress.dump.record import Record
from regress.dump.request_index import INDEX
from regress.dump.source_readers import Source, open_source
from regress.errors import DumpError
from regress.golden.golden_files import CASE_FILE
from regress.layout import DIMENSIONS, Mesh

Side: TypeAlias = Source
"""One of the two sources of a comparison, whatever system wrote it."""
Named: TypeAlias = str | Source
"""A source by the path that any process opens it by, or one in memory, which lies in this process alone."""
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class OwnDump(Source):
    """A complete dump directory of this project."""

    system = "regress"
    precision: str | None = None

    def __init__(self, path: Location) -> None:
        self.folder = path
        self._reader = DumpReader(path, mapped=True)
        provenance = self._reader.manifest.provenance
        sizes = {name: provenance.mesh[name] for name in DIMENSIONS if name in provenance.mesh}
        self._mesh = Mesh(**sizes)
        self.mesh = sizes
        # a foreign configuration may hold anything; rules read its sections only
        sections = {
            name: section for name, section in self._reader.config.items() if isinstance(section, Mapping)
        }
        self.config = sections
        self.precision = _precision(sections)

    @cached_property
    def entries(self) -> Mapping[str, tuple[str, Coordinates]]:
        """All records, in the order of computation."""
        return self._reader.entries

    def read(self, name: str) -> Record:
        """Read one record."""
        return self._reader.read(name)

    def spans(self, name: str, tensors: Collection[str] | None = None) -> Sequence[Span] | None:
        """Return the parts of a mapped file; others are verified as they are read."""
        return self._reader.spans(name, tensors) if self._reader.mapped else None

    def verify(self, name: str, span: Span | None = None) -> None:
        """Compare a file with the checksums in the manifest."""
        self._reader.verify(name, span)

    def root(self, rank: int) -> int:
        """Return the first rank of the same dp and cp place: ranks that share a model share its tokens."""
        return self._mesh.group(rank, "pp", "tp")[0] if rank < self._mesh.world_size else rank

    def writes(self, record_type: str, tensor: str | None = None) -> bool:
        """Return True for any type or tensor; for a captured foreign trainer, only for those that were captured."""
        if not self.config.get("capture"):
            return True
        if tensor is None:
            return record_type in self._captured
        return tensor in self._captured.get(record_type, ())

    @cached_property
    def _captured(self) -> Mapping[str, set[str]]:
        """Captured tensors by type, over all records."""
        found: dict[str, set[str]] = {}
        for name, (record_type, _) in self.entries.items():
            found.setdefault(record_type, set()).update(self.read(name).tensors)
        return found


def _precision(config: Mapping[str, Any]) -> str | None:
    """Return the narrowest dtype that the model computes in according to its configuration."""
    settings = (("model", "dtype"), ("parallel", "fsdp_param_dtype"), ("capture", "autocast"))
    names = [(config.get(section) or {}).get(key) for section, key in settings]
    known = [name for name in names if isinstance(name, str) and name in DTYPES]
    return min(known, key=lambda name: DTYPES[name].itemsize, default=None)


def precisions(sides: Iterable[Side]) -> list[str]:
    """Return the dtypes that the models of some sources computed in, as far as they are known."""
    return [side.precision for side in sides if side.precision is not None]


def open_side(source: Named) -> Side:
    """Open the dump, golden case, file or checkpoint that a path or a URL names; a source is open.

    Raises:
        DumpError: if there is none, or it is incomplete.
    """
    return _opened(source) if isinstance(source, str) else source


def close_sides() -> None:
    """Open paths anew when they are next asked for: what they name may have changed since."""
    _opened.cache_clear()


def kept_with_source(
    maxsize: int,
) -> Callable[
    [Callable[Concatenate[Side, Arguments], Result]], Callable[Concatenate[Named, Arguments], Result]
]:
    """Keep the last results of a function with its source: what does not hold the source goes when that goes."""

    def decorate(
        function: Callable[Concatenate[Side, Arguments], Result],
    ) -> Callable[Concatenate[Named, Arguments], Result]:
        @wraps(function)
        def call(source: Named, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            side = open_side(source)
            if not hasattr(side, "__dict__"):
                return function(side, *args, **kwargs)
            results = vars(side).setdefault("_kept", {})
            if function not in results:
                own = cast(Callable[[], Side], ref(side))  # who asks holds it
                results[function] = lru_cache(maxsize)(lambda *rest, **named: function(own(), *rest, **named))
            found: Result = results[function](*args, **kwargs)
            return found

        return call

    return decorate


@lru_cache(maxsize=8)
def _opened(path: str) -> Side:
    if is_golden(path):
        return GoldenSide(path)
    if is_sent(path):
        flags, whole = flags_of(path)
        return WireView(open_side(whole), flags)
    if is_averaged(path):
        return AveragedSide(open_side(path.removeprefix(AVERAGED)))
    folder = location(path)
    if isinstance(folder, Path) and (folder / CASE_FILE).is_file():
        return GoldenSide(f"{GOLDEN}{folder.absolute()}")
    own, indexed = (folder / MANIFEST).is_file(), (folder / INDEX).is_file()
    source = None if own and not indexed else open_source(folder)  # an index tells more than a manifest
    if source is not None:
        return source
    if own:
        return OwnDump(folder)
    if not folder.is_dir():
        raise no_folder(folder, path)
    inside = dump_inside(folder)
    given = f"give {inside}, the dump inside of it" if inside else "give the dump directory itself"
    raise DumpError(f"""{path} is not a complete dump: it has neither the {MANIFEST} that ours end with, nor folders of
    NexRL with step_* files, nor files of weights; {given}, or record again if the run was interrupted""")
