"""Manifest of a dump: what ran, where, under which settings, and a hash of every file. Loads no torch."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from regress.credential_redaction import redacted_tree
from regress.dump.canonical_json import Json, dumps, loads, plain, tag_floats
from regress.dump.chunk_checksums import CHUNK, fits
from regress.dump.coordinates import FIELDS, Coordinates
from regress.dump.dump_files import Stamp, sync_folder, unreadable, write_atomically
from regress.dump.dump_location import Location, read_bytes
from regress.dump.record_types import FOLDERS, RECORD_TYPES
from regress.errors import DumpError
from regress.json_schema import Count, Hash, Name, conform
from regress.untrusted_files import DOCUMENT

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1
DETERMINISM_VARIABLES = (
    *("NCCL_ALGO", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "CUBLAS_WORKSPACE_CONFIG", "DETERMINISTIC_MODE"),
    *("ATEN_CPU_CAPABILITY", "OMP_NUM_THREADS", "MKL_NUM_THREADS"),
)
"""Environment variables that can change a bit of a result on the same machine."""

_TYPES = frozenset(record_type.name for record_type in RECORD_TYPES)
_PACKAGES = ("torch", "transformers", "accelerate", "tokenizers", "numpy", "ml-dtypes", "grpo-regress")


@dataclass
class Provenance:
    """Provenance of a run; every field is plain JSON.

    Attributes:
        config: the whole configuration.
        versions: package -> version, see `package_versions`.
        environment: see `environment`.
        tokenizer: `{"fingerprint": ...}`; empty when no tokenizer is involved.
        mesh: `{"world_size": 1}` and the extent of each parallel dimension.
    """

    config: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=lambda: package_versions())
    environment: dict[str, Any] = field(default_factory=lambda: environment())
    tokenizer: dict[str, Any] = field(default_factory=dict)
    mesh: dict[str, Any] = field(default_factory=lambda: {"world_size": 1})


@dataclass(frozen=True)
class Entry:
    """One file of a dump.

    Attributes:
        sums: checksums of its chunks, see `regress.dump.chunk_checksums`; empty in manifests of earlier releases.
    """

    type: str
    where: Coordinates
    stamp: Stamp
    sums: str = ""


@dataclass
class Manifest:
    """A complete dump: provenance, format, and each file by its path relative to the dump directory."""

    provenance: Provenance
    format: str
    files: dict[str, Entry]

    def to_json(self) -> dict[str, Json]:
        """Return the content of manifest.json without its own checksum."""
        files = {name: _entry_json(entry) for name, entry in self.files.items()}
        tree = {
            "schema_version": SCHEMA_VERSION,
            **redacted_tree(vars(self.provenance)),
            "format": self.format,
            "files": files,
            "chunk": CHUNK,
            "complete": True,
        }
        return plain(tree, "manifest")  # type: ignore[return-value]  # a dict in, a dict out


def _entry_json(entry: Entry) -> dict[str, Any]:
    row = {"type": entry.type, **vars(entry.where), **vars(entry.stamp)}
    return row | {"xxh3": entry.sums} if entry.sums else row


def write_manifest(folder: Location, manifest: Manifest) -> None:
    """Write manifest.json atomically, after all other files are safe on disk."""
    for name in sorted({str(Path(path).parent) for path in manifest.files}):
        sync_folder(folder / name)
    tree = manifest.to_json()
    tree["sha256"] = _checksum(tree)
    text = json.dumps(tag_floats(tree), sort_keys=True, indent=1, allow_nan=False) + "\n"
    write_atomically(folder / MANIFEST, [text.encode()])
    sync_folder(folder)


def _checksum(tree: Mapping[str, Json]) -> str:
    return hashlib.sha256(dumps(dict(tree)).encode()).hexdigest()


class _File(TypedDict):
    """Row of a file in manifest.json."""

    type: Name
    step: int
    update: Count | None
    epoch: Count | None
    mini_batch: Count | None
    rank: Count | None
    micro: Count | None
    size: Count
    sha256: Hash
    xxh3: NotRequired[str]


class _Document(TypedDict):
    """Content of manifest.json."""

    config: dict[str, Any]
    versions: dict[str, Any]
    environment: dict[str, Any]
    tokenizer: dict[str, Any]
    mesh: dict[str, Any]
    format: Literal["safetensors", "pt", "jsonl"]
    files: dict[str, _File]
    chunk: NotRequired[int]


_CASE = "case.yaml"
"""File of a golden case, which has another ``manifest.json``."""


_INSIDE = ("debug_dump", "weaver_debug_dump", "dump")
"""Folders that runs write their dump into."""


def dump_inside(folder: Location) -> Location | None:
    """Return the dump in the folder of a run; None where it has none under the usual names."""
    return next((folder / name for name in _INSIDE if (folder / name).is_dir()), None)


def no_folder(path: Location, name: str | None = None) -> DumpError:
    """Return the error of a path that is no folder; ``name`` is the path as it was given."""
    what = "is a file that holds no tensors" if path.is_file() else "does not exist"
    return DumpError(f"{name or path} {what}: give the folder of a dump")


def read_manifest(folder: Location) -> Manifest:
    """Read and verify manifest.json; raises `DumpError` when it is missing, damaged or not of this schema."""
    path = folder / MANIFEST
    try:
        tree = loads(read_bytes(path, DOCUMENT))
        return _from_json(tree)
    except (FileNotFoundError, NotADirectoryError):
        if not folder.is_dir():
            raise no_folder(folder) from None
        inside = dump_inside(folder)
        remedy = f"give {inside}, the dump inside of it" if inside else "record again or correct the path"
        raise DumpError(f"""{folder} is not a complete dump: it has no {MANIFEST}, which is written last, so the run was
        interrupted or the path is not that of a dump directory; {remedy}""") from None
    except OSError as error:
        raise unreadable(path, error) from error
    except (KeyError, ValueError, TypeError, DumpError) as error:
        if (folder / _CASE).is_file():
            raise DumpError(f"""{folder} is a golden case, and a dump was asked for: give the dump of a run; compare,
            explain and dump check take the case as golden:{folder.name}""") from None
        why = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise DumpError(f"{path} is damaged ({why}): copy the dump again or record again") from None


def _from_json(tree: Any) -> Manifest:
    if not isinstance(tree, dict):
        raise TypeError("it is not a JSON object")
    checksum = tree.pop("sha256")
    if tree["schema_version"] != SCHEMA_VERSION:
        raise ValueError(f"schema version {tree['schema_version']!r}, this release reads {SCHEMA_VERSION}")
    if checksum != _checksum(tree) or tree["complete"] is not True:
        raise ValueError("its content does not match its checksum")
    document: _Document = conform(tree, _Document, "its content")
    for name, extent in document["mesh"].items():
        if type(extent) is not int or not 1 <= extent < 2**63:
            raise ValueError(f"its mesh has the extent {name}={extent!r}, which is not a number of ranks")
    provenance = Provenance(**{name: tree[name] for name in Provenance.__dataclass_fields__})
    sums = document.get("chunk") == CHUNK
    files = {name: _entry(name, row, document["format"], sums) for name, row in document["files"].items()}
    return Manifest(provenance, document["format"], files)


def _entry(name: str, row: _File, format: str, sums: bool) -> Entry:
    """Return the entry of a file; chunks of another size than ours are verified by the hash of the whole file."""
    where = Coordinates(**{key: row[key] for key in FIELDS})  # type: ignore[literal-required]  # its own keys
    folder, _, file = name.rpartition("/")
    if folder not in FOLDERS or file != f"{where.stem}.{format}" or row["type"] not in _TYPES:
        raise ValueError(f"its file {name!r} does not fit the type and the place that stand beside it")
    found = row.get("xxh3", "") if sums else ""
    if found and not fits(found, row["size"]):
        raise ValueError(f"its file {name!r} has other checksums than {row['size']} bytes need")
    return Entry(row["type"], where, Stamp(row["size"], row["sha256"]), found)


def package_versions(names: Iterable[str] = _PACKAGES) -> dict[str, str]:
    """Return the versions of Python and of the installed packages among `names`, without importing them."""
    found = {name: _installed(name) for name in names}
    known = {name: version for name, version in found.items() if version is not None}
    return {"python": platform.python_version(), **known}


@cache
def _installed(name: str) -> str | None:
    """Return the version of a package; None for one that is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def environment(device: str = "cpu", threads: int | None = None) -> dict[str, Any]:
    """Return the determinism environment: variables that are set, device, thread count and processor."""
    variables = {name: os.environ[name] for name in DETERMINISM_VARIABLES if name in os.environ}
    return {
        "variables": variables,
        "device": device,
        "threads": threads,
        "machine": platform.machine(),
        "system": platform.system(),
    }
