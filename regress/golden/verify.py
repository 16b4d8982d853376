"""Check of every byte of a golden directory: inputs, truth, manifests, pending updates, stored checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from regress.dump.reader import read
from regress.errors import DumpError, GoldenError
from regress.golden import truth as truths
from regress.golden.case import GoldenCase
from regress.golden.commit import leftovers
from regress.golden.entries import TensorEntry
from regress.golden.manifest import Manifest
from regress.golden.names import CHECKS, PENDING, plain_name, truth_files
from regress.golden.pending import pending_names
from regress.golden.pending_checks import pending_check, pending_checks
from regress.golden.proposal import Pending, read_pending
from regress.golden.store import GoldenStore


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
    return list(_verify(store, names))


def _verify(store: GoldenStore, names: Sequence[str]) -> Iterator[Finding]:
    for name in names or store.names():
        yield from verify_case(store.folder(name))
    for name in pending_names(store):
        if not names or name in names:
            yield from _pending(store, name)
    if not names:
        yield from _checks(store)


def verify_case(folder: Path) -> Iterator[Finding]:
    """Yield the findings about one case."""
    try:
        case = GoldenCase(folder, allow_changed_inputs=True)
    except GoldenError as error:
        yield Finding(folder.name, str(error))
        return
    if case.manifest is None:
        yield Finding(
            case.name, f"{folder} is not recorded yet: run regress golden record {case.name}", damage=False
        )
        if truth_files(folder):
            yield Finding(
                case.name, f"{folder / 'truth'} has no manifest beside it: restore it, or record the case"
            )
        return
    yield from (Finding(case.name, problem) for problem in case.input_problems())
    yield from _caught(case.name, case.trajectories)
    yield from _truth(case.name, case.manifest, [folder])
    yield from _others(case.name, folder, case.manifest)


def _truth(name: str, manifest: Manifest, roots: Sequence[Path]) -> Iterator[Finding]:
    for row in manifest.truth.values():
        for quantity, entry in row.items():
            try:
                tensors = truths.read(roots, entry, quantity)
            except GoldenError as error:
                yield Finding(name, str(error))
                continue
            for tensor, array in tensors.items():
                if TensorEntry.of(array) != entry.tensors[tensor]:
                    yield Finding(
                        name, f"{roots[-1] / entry.file}: {tensor} is not what the manifest says of it"
                    )


def _others(name: str, folder: Path, manifest: Manifest) -> Iterator[Finding]:
    dead = leftovers(folder, manifest)
    if dead:
        count = f"{len(dead)} files" if len(dead) > 1 else "a file"
        text = (
            f"{folder / dead[0]} is left over from an update that was taken back or interrupted ({count} of the case "
            "that its manifest does not name): remove what is left over with regress golden prune"
        )
        yield Finding(name, text, damage=False)
    for path in truth_files(folder):
        if plain_name(path) not in manifest.files and path not in dead:
            yield Finding(name, f"{folder / path} is no file of the case: move it away", damage=False)


def _pending(store: GoldenStore, name: str) -> Iterator[Finding]:
    try:
        found = read_pending(store, name)
        if found is None:  # accepted or rejected in the meantime
            return
        found.current()
    except GoldenError as error:
        yield Finding(name, str(error))
        return
    yield from _truth(name, _own(found), [found.folder])
    yield Finding(
        name, f"{found.folder} is pending: look at it with regress golden review {name}", damage=False
    )


def _own(pending: Pending) -> Manifest:
    """Return the part of a pending manifest whose files lie with the update."""
    current = pending.current()
    here = set() if current is None else current.files
    truth = {
        w: {q: e for q, e in row.items() if e.file not in here} for w, row in pending.manifest.truth.items()
    }
    return Manifest(truth=truth)


def _checks(store: GoldenStore) -> Iterator[Finding]:
    for path in sorted((store.root / CHECKS).rglob("*.safetensors")):
        yield from _caught(CHECKS, partial(read, path))
    for name in pending_checks(store):
        yield from _caught(CHECKS, partial(pending_check, store, name))
        text = f"{store.root / PENDING / name} is pending: look at it with regress golden review {CHECKS}"
        yield Finding(CHECKS, text, damage=False)


def _caught(name: str, attempt: Callable[[], object]) -> Iterable[Finding]:
    try:
        attempt()
    except (GoldenError, DumpError) as error:
        return [Finding(name, str(error))]
    return []
