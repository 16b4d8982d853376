"""Manifest of a checkpoint, or of a save of the service: size and SHA-256 of each of its files, written last.

Loads no torch.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from regress.dump.canonical_json import dumps, loads
from regress.dump.dump_files import Stamp, file_stamp, stamp_of, unreadable, write_atomically
from regress.dump.dump_location import Location, children, read_bytes
from regress.dump.dump_manifest import MANIFEST
from regress.dump.file_damage import CUT_OFF
from regress.errors import CheckpointError, DumpError
from regress.untrusted_files import DOCUMENT

SCHEMA_VERSION = 1
READ_SUFFIXES = (".json", ".safetensors", ".bin", ".pt", ".pth", ".pkl", ".py", ".jinja", ".model")
"""Suffixes of files that would change what is loaded from a checkpoint."""


def stamps_of(folder: Path) -> dict[str, Stamp]:
    """Return the stamps of all files in a folder, as they are read, by their paths within it."""
    return {name: file_stamp(folder / name) for name in sorted(_listed(folder, ""))}


def write_manifest(folder: Location, files: Mapping[str, Stamp]) -> Stamp:
    """Write the manifest of a checkpoint whose other files are all written; return its stamp."""
    return write_atomically(folder / MANIFEST, [manifest_bytes(files)])


def manifest_bytes(files: Mapping[str, Stamp]) -> bytes:
    """Return the manifest of a checkpoint that holds these files."""
    tree: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "kind": "checkpoint",
        "files": {name: vars(stamp) for name, stamp in sorted(files.items())},
        "complete": True,
    }
    tree["sha256"] = _checksum(tree)
    return (json.dumps(tree, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()


def read_manifest(folder: Location) -> dict[str, Stamp]:
    """Return the files that the manifest of a checkpoint lists.

    Raises:
        CheckpointError: if it is missing, damaged, of another schema, or that of something else.
    """
    path = folder / MANIFEST
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder, but a checkpoint is one; check the path")
    try:
        _require_regular(path)
        return parse_manifest(read_bytes(path, DOCUMENT))
    except FileNotFoundError:
        raise CheckpointError(f"""{folder} is not a complete checkpoint: it has no {MANIFEST}, which is written last;
        resume from another one""") from None
    except OSError as error:
        raise CheckpointError(str(unreadable(path, error))) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is damaged ({error}); copy the checkpoint again, or resume from another one"
        ) from None


def verify(folder: Location, *, read: bool = True) -> dict[str, Stamp]:
    """Return the files of a checkpoint after comparing the content of each with the manifest.

    Args:
        read: False compares sizes alone, for a manifest that was just made of these files.

    Raises:
        CheckpointError: naming the first file that is missing, additional or not what was written.
    """
    files = read_manifest(folder)
    found = set(_listed(folder, ""))
    for name in sorted(files.keys() - found):
        raise CheckpointError(f"""{folder} lacks {name}; it was deleted or not copied: copy the checkpoint again, or
        resume from another one""")
    for name in sorted(found - files.keys()):
        if PurePosixPath(name).suffix in READ_SUFFIXES and not PurePosixPath(name).name.startswith("."):
            raise CheckpointError(f"{folder} has {name}, which is not of this checkpoint; move it away")
    for name, stamp in files.items():
        if not read and _size(folder, name) == stamp.size:
            continue
        _require(folder, name, stamp)
    return files


def _size(folder: Location, name: str) -> int | None:
    path = _below(folder, name)
    return path.stat().st_size if isinstance(path, Path) else None


def _require(folder: Location, name: str, stamp: Stamp) -> None:
    path = _below(folder, name)
    try:
        _require_regular(path)
        found = file_stamp(path, stamp.size) if isinstance(path, Path) else stamp_of(path.read_bytes())
    except (ValueError, DumpError) as error:
        raise CheckpointError(
            f"{path} cannot be used ({error}); copy the checkpoint again, or resume from another one"
        ) from None
    if found != stamp:
        raise CheckpointError(f"""{path} has {found.size} bytes that do not match the size and hash in {MANIFEST};
        {CUT_OFF}, or resume from another checkpoint""")


def _below(folder: Location, name: str) -> Location:
    path = folder
    for part in PurePosixPath(name).parts:
        path = path / part
    return path


def _require_regular(path: Location) -> None:
    """Raise `ValueError` for a file that could be waited for for ever, or never end."""
    if isinstance(path, Path) and path.exists() and not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("it is not a regular file")


def _listed(folder: Location, prefix: str) -> list[str]:
    found = []
    for path in children(folder):
        if path.is_dir():
            found += _listed(path, f"{prefix}{path.name}/")
        elif prefix or path.name != MANIFEST:
            found.append(f"{prefix}{path.name}")
    return found


def parse_manifest(data: bytes) -> dict[str, Stamp]:
    """Return the files that a manifest lists; raises `ValueError`, `TypeError` or `KeyError` for what is none."""
    tree = loads(data)
    if not isinstance(tree, dict):
        raise TypeError("it is not a JSON object")
    checksum = tree.pop("sha256")
    if tree.get("kind") != "checkpoint":
        raise ValueError("it is not that of a checkpoint")
    if tree["schema_version"] != SCHEMA_VERSION:
        raise ValueError(f"schema version {tree['schema_version']}, this release reads {SCHEMA_VERSION}")
    if checksum != _checksum(tree) or tree["complete"] is not True:
        raise ValueError("its content does not match its checksum")
    for name in tree["files"]:
        parts = PurePosixPath(name).parts
        if not parts or PurePosixPath(name).is_absolute() or ".." in parts:
            raise ValueError(f"it lists {name!r}, which lies outside of the checkpoint")
    return {name: Stamp(int(row["size"]), str(row["sha256"])) for name, row in tree["files"].items()}


def _checksum(tree: Mapping[str, Any]) -> str:
    return hashlib.sha256(dumps(dict(tree)).encode()).hexdigest()
