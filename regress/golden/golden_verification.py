"""Every byte of a golden directory: what is damaged, and what nothing needs any more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from regress.durable_files import TEMPORARY
from regress.errors import DumpError, GoldenError
from regress.golden.case_manifest import Manifest, TensorEntry, read_manifest
from regress.golden.case_update import leftovers
from regress.golden.golden_case import GoldenCase, read_truth
from regress.golden.golden_directory import GoldenStore
from regress.golden.golden_files import CHECKS, changing, truth_file, truth_files
from regress.golden.stored_checks import is_check, read_check, stored_checks
from regress.untrusted_files import parse_json, read_bytes


@dataclass(frozen=True)
class Finding:
    """One finding.

    Attributes:
        case: name of the case, or `checks`.
        text: a sentence that names the file.
        damage: True if something recorded cannot be used; otherwise the finding is only worth knowing.
    """

    case: str
    text: str
    damage: bool = True


def verify(store: GoldenStore, names: Sequence[str] = ()) -> list[Finding]:
    """Read and check everything, or all of some cases; return an empty list if nothing was found."""
    found = [finding for name in names or store.names() for finding in verify_case(store.folder(name))]
    if not names:
        for path in stored_checks(store.root):
            found += _caught(CHECKS, partial(read_check, store.root, path))
    return found


def verify_case(folder: Path) -> Iterator[Finding]:
    """Yield the findings about one case."""
    name = folder.name
    try:
        case = GoldenCase(folder, allow_changed_inputs=True)
    except GoldenError as error:
        yield Finding(name, str(error))
        return
    if case.manifest is None:
        yield Finding(name, f"{folder} is not recorded yet: run regress golden record {name}", damage=False)
        if truth_files(folder):
            yield Finding(
                name, f"{folder / 'truth'} has no manifest beside it: restore it, or record the case"
            )
        return
    yield from (Finding(name, problem) for problem in case.input_problems())
    yield from _caught(name, case.trajectories)
    yield from _truth(folder, case.manifest)
    dead = leftovers(folder, case.manifest)
    if dead:
        count = f"{len(dead)} files" if len(dead) > 1 else "a file"
        text = (
            f"{folder / dead[0]} is left over from an update that was taken back or interrupted ({count} of the case "
            "that its manifest does not name): remove what is left over with regress golden prune"
        )
        yield Finding(name, text, damage=False)
    for path in truth_files(folder):
        if path not in case.manifest.files and path not in dead:
            yield Finding(name, f"{folder / path} is not a file of the case: move it away", damage=False)


def _truth(folder: Path, manifest: Manifest) -> Iterator[Finding]:
    for where, row in manifest.truth.items():
        for quantity, entry in row.items():
            try:
                tensors = read_truth(folder, where, quantity, entry)
            except GoldenError as error:
                yield Finding(folder.name, str(error))
                continue
            for tensor, array in tensors.items():
                if TensorEntry.of(array) != entry.tensors[tensor]:
                    text = f"{folder / truth_file(where, quantity)}: {tensor} is not what the manifest says of it"
                    yield Finding(folder.name, text)


def _caught(name: str, attempt: Callable[[], object]) -> Iterable[Finding]:
    try:
        attempt()
    except (GoldenError, DumpError) as error:
        return [Finding(name, str(error))]
    return []


def prunable(store: GoldenStore, orphans: Path) -> list[Path]:
    """Return the files that `prune` would remove: leftovers of killed writers, and checks that no test asks for.

    Raises `GoldenError` when a manifest is damaged, so that it is not known what a case needs, or when the list of
    orphans is not a list of stored checks.
    """
    found: list[Path] = []
    for name in store.names():
        folder = store.folder(name)
        if (manifest := read_manifest(folder)) is not None:  # without one it is not known what the case needs
            found += (folder / path for path in leftovers(folder, manifest))
    found += sorted(p for p in (store.root / CHECKS).rglob(f"{TEMPORARY}*") if p.is_file())
    return found + orphaned(store, orphans)


def prune(store: GoldenStore, orphans: Path) -> list[Path]:
    """Remove leftovers and orphans; return the paths of the files removed.

    This is the only way in which a golden is ever deleted without a replacement.
    """
    if not store.root.is_dir():
        return []
    with changing(store.root) as batch:
        gone = prunable(store, orphans)
        for path in gone:
            batch.remove(path)
    return gone


def orphaned(store: GoldenStore, listed: Path) -> list[Path]:
    """Return the stored checks that belonged to no test in the last full run, and were not written since."""
    try:
        names, since = parse_json(read_bytes(listed)), listed.stat().st_mtime_ns
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
        raise GoldenError(
            f"{listed} cannot be read ({error}): run pytest without -k or paths again"
        ) from None
    if not isinstance(names, list) or not all(map(is_check, names)):
        raise GoldenError(f"{listed} is not a list of stored checks: run pytest without -k or paths again")
    paths = [store.root / name for name in names]
    return [path for path in paths if path.is_file() and path.stat().st_mtime_ns <= since]
