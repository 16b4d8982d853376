"""Removal of unused files: leftovers of interrupted updates, and stored checks that no test asks for.

This is the only way in which a golden is ever deleted without a replacement.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from regress.dump.files import TEMPORARY
from regress.errors import GoldenError
from regress.golden.commit import leftovers
from regress.golden.manifest import read_manifest
from regress.golden.names import CHECKS, PENDING, PROPOSAL
from regress.golden.pending_checks import is_check
from regress.golden.proposal import read_pending
from regress.golden.store import GoldenStore
from regress.golden.transaction import transaction
from regress.inputs import parse_json, read_bytes

ORPHANS = ".pytest_cache/v/regress/orphans"
"""File in which the plugin lists orphans after a full run: a JSON list of paths within the golden directory."""


def prunable(store: GoldenStore, orphans: Path) -> list[Path]:
    """Return the files that `prune` would remove.

    Raises `GoldenError` when a manifest is damaged, so that it is not known what a case needs, or when the list of
    orphans is no list of stored checks.
    """
    return [*_left(store), *_temporary(store.root / CHECKS), *orphaned(store, orphans)]


def prune(store: GoldenStore, orphans: Path) -> list[Path]:
    """Remove leftovers and orphans; return the paths of the files removed."""
    if not store.root.is_dir():
        return []
    with transaction(store.root) as changes:
        gone = prunable(store, orphans)
        for path in gone:
            changes.remove(path)
        return gone


def orphaned(store: GoldenStore, listed: Path) -> list[Path]:
    """Return the stored checks that belonged to no test in the last full run, and were not written since."""
    try:
        names = parse_json(read_bytes(listed))
        since = listed.stat().st_mtime_ns
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
        raise GoldenError(
            f"{listed} cannot be read ({error}): run pytest without -k or paths again"
        ) from None
    if not isinstance(names, list) or not all(map(is_check, names)):
        raise GoldenError(f"{listed} is no list of stored checks: run pytest without -k or paths again")
    paths = [store.root / name for name in names]
    return [path for path in paths if path.is_file() and path.stat().st_mtime_ns <= since]


def _left(store: GoldenStore) -> Iterator[Path]:
    for name in store.names():
        folder = store.folder(name)
        manifest = read_manifest(folder)
        if manifest is not None:  # without one the truth files are unknown: restore it or record the case
            yield from (folder / path for path in leftovers(folder, manifest))
    for folder in _pending_folders(store):
        found = read_pending(store, folder.name) if (folder / PROPOSAL).exists() else None
        yield from (folder / path for path in leftovers(folder, None if found is None else found.manifest))


def _pending_folders(store: GoldenStore) -> list[Path]:
    return sorted(p for p in (store.root / PENDING).glob("*") if p.is_dir() and p.name != CHECKS)


def _temporary(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob(f"{TEMPORARY}*") if path.is_file())
