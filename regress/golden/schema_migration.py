"""Migration of cases of schema 1, whose truth files were named by their content and compressed."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

from regress.dump.canonical_json import loads
from regress.durable_files import Batch, Stamp
from regress.errors import DumpError, GoldenError
from regress.golden.case_manifest import Manifest, checksum
from regress.golden.golden_directory import GoldenStore
from regress.golden.golden_files import MANIFEST, RESTORE, changing, read, truth_file

_OLD = 1
_GZIP = 31
"""Window bits by which zlib reads a gzip file."""


def migrate(store: GoldenStore) -> list[str]:
    """Give all cases of a golden directory the schema of today, or none of them; values stay bit for bit.

    Returns:
        The names of the cases that had schema 1.

    Raises:
        GoldenError: naming the file that is missing or damaged.
    """
    with changing(store.root) as batch:
        return [name for name in store.names() if _migrated(batch, store.folder(name))]


def _migrated(batch: Batch, folder: Path) -> bool:
    """Add to a batch what a case of schema 1 becomes; return False for any other."""
    path = folder / MANIFEST
    if not path.exists():
        return False
    try:
        tree: dict[str, Any] = loads(read(path))
        if tree["schema_version"] != _OLD:
            return False
        if tree.pop("sha256") != checksum(tree):
            raise ValueError("its content does not match its checksum")
        del tree["schema_version"]
        for row in tree["truth"].values():
            for entry in row.values():
                del entry["file"]
        tree["provenance"].pop("source", None)
        manifest = Manifest.from_json(tree)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, DumpError) as error:
        raise GoldenError(f"{path} is damaged ({error}): restore it from version control") from None
    for where, row in manifest.truth.items():
        for quantity, entry in row.items():
            name = truth_file(where, quantity)
            old = folder / name.replace(".safetensors", f".{entry.stamp.sha256[:12]}.safetensors")
            packed = old.with_name(f"{old.name}.gz")
            batch.write(folder / name, [_content(packed if packed.exists() else old, entry.stamp)])
            batch.remove(packed if packed.exists() else old)
    batch.write(path, [manifest.text.encode()])
    return True


def _content(path: Path, stamp: Stamp) -> bytes:
    """Return what a truth file holds, decompressed if it is stored so, but not more than was recorded."""
    if path.suffix != ".gz":
        return read(path, stamp)
    stream = zlib.decompressobj(wbits=_GZIP)
    try:
        data = stream.decompress(read(path), stamp.size + 1)
    except zlib.error as error:
        raise GoldenError(f"{path} is not an intact compressed file ({error}): {RESTORE}") from None
    if Stamp.of(data) != stamp or not stream.eof:
        raise GoldenError(f"{path} does not match its recorded hash, so it is damaged or changed: {RESTORE}")
    return data
