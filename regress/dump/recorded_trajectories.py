"""Recorded trajectories for a replay: from one file, a folder of steps, or a whole dump."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from regress.dump.canonical_json import Json
from regress.dump.coordinates import parse_stem
from regress.dump.dump_location import Location, children, location
from regress.dump.dump_manifest import MANIFEST
from regress.dump.dump_reader import DumpReader, is_dump_file, read_all
from regress.dump.record import Record
from regress.dump.record_types import FOLDERS
from regress.dump.trajectory import Trajectory, from_record
from regress.errors import DumpError

PICKLE = ".pkl"


@dataclass(frozen=True)
class RecordedStep:
    """Trajectories of one step, the file that holds them, and the metadata beside them."""

    step: int
    path: Location
    trajectories: list[Trajectory]
    meta: dict[str, Json]


def read_trajectories(path: str | Location, format: str = "auto") -> dict[int, RecordedStep]:
    """Return all recorded steps under `path`, by step.

    `path` is a file (jsonl may hold several steps), a folder of `step_*` files, or a dump directory. Where a
    manifest covers the files, they are verified against it. Raises `DumpError` naming the file for anything
    missing, damaged, duplicate, or not a trajectory.
    """
    refuse_pickles(location(path))
    steps: dict[int, RecordedStep] = {}
    for file, record in _records(location(path).absolute(), format):
        if record.type != "trajectory":
            raise DumpError(
                f"{file} holds {record.type}, not trajectories: give the file of the type trajectory"
            )
        if record.step in steps:
            raise DumpError(
                f"step {record.step} is recorded in both {steps[record.step].path} and {file}: keep one"
            )
        meta = {key: value for key, value in record.meta.items() if key != "samples"}
        try:
            trajectories = from_record(record)
        except DumpError as error:
            raise DumpError(f"{file} cannot be used: {error}") from None
        steps[record.step] = RecordedStep(record.step, file, trajectories, meta)
    return dict(sorted(steps.items()))


def refuse_pickles(path: Location) -> None:
    """Refuse recordings of ROLL: `step_*.pkl`, in a folder of their own or below train/ and val/.

    Raises `DumpError` naming one of them.
    """
    if path.suffix == PICKLE:
        found = [path] if path.is_file() and parse_stem(path.stem) is not None else []
    elif any(map(is_dump_file, children(path))) or (path / MANIFEST).is_file():
        return
    else:
        folders = [path, *(path / name for name in FOLDERS if (path / name).is_dir())]
        found = [file for folder in folders for file in children(folder) if file.suffix == PICKLE]
        found = [file for file in found if parse_stem(file.stem) is not None]
    if found:
        raise DumpError(f"""{found[0]} is a rollout that ROLL has pickled: a pickle may run code and is never loaded, so
        record the rollouts anew with rollout_mock.mode=dump, or export them from ROLL as jsonl trajectories (see the
        dump format in the documentation)""")


def _records(path: Location, format: str) -> Iterator[tuple[Location, Record]]:
    if not path.is_dir():
        yield from _from_file(path, format)
    elif any(map(is_dump_file, children(path))):
        yield from _from_folder(path, format)
    elif not (path / MANIFEST).is_file() and (path / "trajectory").is_dir():
        raise DumpError(f"""{path} has no {MANIFEST}, so the run that wrote it was interrupted: record again, or give
        {path / "trajectory"} to replay the steps it left whole""")
    else:
        yield from _from_dump(DumpReader(path, only="trajectory"), format)


def _from_file(path: Location, format: str) -> Iterator[tuple[Location, Record]]:
    if _is_of_dump(path.parent):
        reader = DumpReader(path.parent.parent, only=path.parent.name)
        yield from _from_dump(reader, format, [f"{path.parent.name}/{path.name}"])
        return
    for record in read_all(path, format):
        yield path, record


def _from_folder(path: Location, format: str) -> Iterator[tuple[Location, Record]]:
    if _is_of_dump(path):
        yield from _from_dump(DumpReader(path.parent, only=path.name), format)
        return
    for file in filter(is_dump_file, children(path)):
        where = parse_stem(file.stem)
        for record in read_all(file, format):
            if where is not None and where.step != record.step:
                raise DumpError(f"{file} holds step {record.step}: it was renamed; give it back its name")
            yield file, record


def _is_of_dump(folder: Location) -> bool:
    """Return True if a folder of records belongs to a dump; other folders may stand beside another
    program's manifest.json.
    """
    return folder.name in FOLDERS and (folder.parent / MANIFEST).is_file()


def _from_dump(
    reader: DumpReader, format: str, names: list[str] | None = None
) -> Iterator[tuple[Location, Record]]:
    written = reader.manifest.format
    if format not in ("auto", written):
        raise DumpError(
            f"{reader.folder} is a {written} dump, not {format}: set the format to {written} or auto"
        )
    if not (names or reader.names()):
        raise DumpError(f"{reader.folder} holds no trajectories: record with dump_options.trajectory=true")
    for name in names or reader.names():
        yield reader.folder / name, reader.read(name)
