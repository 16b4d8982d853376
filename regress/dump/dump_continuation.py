"""Continuing a dump: what an earlier process recorded before a place in the run stays, and the rest is made again."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from regress.dump.chunk_checksums import file_sums
from regress.dump.coordinates import Coordinates, parse_stem
from regress.dump.dump_files import TEMPORARY, Stamp, file_stamp, probe, stamp_of, unwritable
from regress.dump.dump_location import Location
from regress.dump.dump_manifest import MANIFEST, Entry
from regress.dump.dump_reader import files_within, is_dump_file, read_all
from regress.dump.formats import Format
from regress.errors import DumpError

_MODULUS = 2**256
STEP_METRICS = "step_metrics"


@dataclass(frozen=True)
class Position:
    """Records that a dump holds, as their number and a digest of names, sizes and hashes that any order gives."""

    files: int
    digest: str

    @classmethod
    def of(cls, stamps: Mapping[str, Stamp]) -> Position:
        """Return the position of a dump with these files."""
        lines = (f"{name}|{stamp.size}|{stamp.sha256}" for name, stamp in stamps.items())
        total = sum(int.from_bytes(hashlib.sha256(line.encode()).digest(), "big") for line in lines)
        return cls(len(stamps), f"{total % _MODULUS:064x}")

    def joined(self, other: Position) -> Position:
        """Return the position of a dump with the files of both."""
        total = (int(self.digest, 16) + int(other.digest, 16)) % _MODULUS
        return Position(self.files + other.files, f"{total:064x}")


@dataclass(frozen=True)
class ContinuationPoint:
    """Place in a run between two optimizer updates.

    Attributes:
        step: completed steps.
        updates_in_step: updates of the next step that are made, too.
    """

    step: int
    updates_in_step: int

    def keeps(self, folder: str, where: Coordinates) -> bool:
        """Return True if a record lies before this place.

        Records of the whole unfinished step are made again, except rollouts (``train``, ``val``, ``val_samples``),
        which are not. The metrics of a step carry the number of its last update, but come after all of them.
        """
        if where.step != self.step:
            return where.step < self.step
        if folder in ("val", "val_samples"):
            return True
        if folder == "train":
            return self.updates_in_step > 0
        if folder == STEP_METRICS:
            return False
        return where.update is not None and where.update < self.updates_in_step


@dataclass(frozen=True)
class StartingPlace:
    """Place in a run at which a dump is continued.

    Attributes:
        place: the place.
        position: records before it, as the earlier process knew them.
        stated: name of what the run goes on from, for errors.
    """

    place: ContinuationPoint
    position: Position
    stated: str


def continued(folder: Location, format: Format, start: StartingPlace) -> dict[str, Entry]:
    """Return the records that stay, after removing all others and the manifest.

    Raises:
        DumpError: if they are not those that the earlier process had recorded, or are of another format.
    """
    below = files_within(folder)
    kept: dict[str, Entry] = {}
    others: list[Location] = []
    for path in below:
        where = parse_stem(path.stem) if is_dump_file(path) else None
        if where is None:
            others += [path] if path.name.startswith(TEMPORARY) else []
        elif start.place.keeps(path.parent.name, where):
            kept[f"{path.parent.name}/{path.name}"] = _entry(path, format, start)
        else:
            others.append(path)
    found = Position.of({name: entry.stamp for name, entry in kept.items()})
    if found != start.position:
        raise DumpError(f"""{folder} holds {found.files} records from before {start.stated}, which knows of
        {start.position.files}{_unequal(found, start.position)}; restore them, or choose another dump directory""")
    try:
        if (folder / MANIFEST).exists():
            (folder / MANIFEST).unlink()
        for path in others:
            path.unlink()
        probe(folder)
    except OSError as error:
        raise unwritable(folder, error) from error
    return kept


def _unequal(found: Position, known: Position) -> str:
    return " others" if found.files == known.files else ""


def _entry(path: Location, format: Format, start: StartingPlace) -> Entry:
    if path.suffix != f".{format.name}":
        raise DumpError(f"""{path} was recorded as {path.suffix.removeprefix(".")} before {start.stated} and would be
        continued as {format.name}; keep the dump format, or choose another dump directory""")
    (record,) = read_all(path)
    stamp = file_stamp(path) if isinstance(path, Path) else stamp_of(path.read_bytes())
    return Entry(record.type, record.where, stamp, file_sums(path))
