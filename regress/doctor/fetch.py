"""Copy of what the doctor looks at of a run or checkpoint in a store."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from regress.doctor.tree import HEADER_LIMIT, JSON_LIMIT
from regress.dump.location import Location, children, size
from regress.dump.manifest import MANIFEST
from regress.dump.remote import RemotePath, open_url
from regress.engine.checkpoint.names import CURRICULUM_STATE, STATE, checkpoints, parse_name
from regress.errors import DoctorError

SMALL = 2**20
"""Bytes of files that are always copied whole."""
_OF_RUN = ("metrics.jsonl", CURRICULUM_STATE, "wandb_sync_state.json")
_HEAD = 8  # bytes that tell the length of a safetensors header


def fetch(url: str, folder: Path, *, whole: bool) -> tuple[Path, str | None, tuple[str, ...]]:
    """Copy a checkpoint, or the newest one of a run with the run's own files, into a folder.

    Args:
        whole: copy all bytes; otherwise those of large files beyond their headers are holes of the same size, which
            is enough where no content is compared.

    Returns:
        The copy of the output directory, the checkpoint's name in it, and the names of the run's other checkpoints,
        newest first.

    Raises:
        DoctorError: if there is neither.
        DumpError: if the store cannot be read.
    """
    place = open_url(url)
    if parse_name(place.name) is not None or any((place / name).is_file() for name in (STATE, MANIFEST)):
        if not place.is_dir():
            raise DoctorError(f"CHECKPOINT {place} is no folder with anything in it; correct the URL")
        root = folder / "run"
        _copy(place, root / place.name, whole)
        return root, place.name, ()
    found = checkpoints(place)[::-1]
    files = [place / name for name in _OF_RUN if (place / name).is_file()]
    if not found and not files:
        raise DoctorError(
            f"CHECKPOINT {place} is neither a checkpoint nor the directory of a run: it holds no checkpoint-<step> "
            f"with {MANIFEST}, and no metrics.jsonl; correct the URL"
        )
    root = folder / (place.name or "run")
    for path in files:
        _write(root / path.name, path, whole=True)
    for other in found[1:]:
        for name in (MANIFEST, STATE):
            if (other / name).is_file():
                _write(root / other.name / name, other / name, whole=True)
    if found:
        _copy(found[0], root / found[0].name, whole)
    return root, found[0].name if found else None, tuple(path.name for path in found[1:])


def _copy(source: Location, target: Path, whole: bool) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for name, path in _files(source, ""):
        _write(target / name, path, whole)


def _files(folder: Location, prefix: str) -> Iterator[tuple[str, Location]]:
    for path in children(folder):
        if path.name in ("", ".", "..") or "\0" in path.name:
            continue
        if path.is_dir():
            yield from _files(path, f"{prefix}{path.name}/")
        else:
            yield f"{prefix}{path.name}", path


def _write(target: Path, source: Location, whole: bool) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    length = size(source)
    text = source.suffix in (".json", ".jsonl") and length <= JSON_LIMIT
    if whole or text or length <= SMALL or not isinstance(source, RemotePath):
        target.write_bytes(source.read_bytes())
        return
    with target.open("wb") as file:
        if source.suffix == ".safetensors":
            file.write(source.read_start(_HEAD + _header_length(source.read_start(_HEAD), length)))
        file.truncate(length)


def _header_length(head: bytes, length: int) -> int:
    (told,) = struct.unpack("<Q", head)
    return min(int(told), length - _HEAD, HEADER_LIMIT)
