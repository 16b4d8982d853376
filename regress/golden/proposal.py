"""Pending update on disk: `.pending/<case>/proposal.json` and the truth files it adds.

The file holds the manifest that the case would have; replacing it is the commit of a proposal.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regress.errors import GoldenError
from regress.golden.commit import plan_sweep
from regress.golden.difference import Difference, Side, compare
from regress.golden.manifest import Manifest, read_manifest
from regress.golden.names import PENDING, PROPOSAL
from regress.golden.sealed import read_sealed, seal
from regress.golden.store import GoldenStore
from regress.golden.transaction import Changes

_KEYS = {"case", "bases", "manifest", "notes"}


@dataclass(frozen=True)
class Pending:
    """Pending update of one case.

    Attributes:
        case, folder: name of the case, and where the update lies.
        target: folder of the case.
        bases: checksums of the manifests to which it applies; None for a case that was not recorded.
        manifest: manifest that the case would have.
        notes: notes of the proposer, line by line.
    """

    case: str
    folder: Path
    target: Path
    bases: tuple[str | None, ...]
    manifest: Manifest
    notes: tuple[str, ...]

    def fits(self, found: Manifest | None) -> bool:
        """Return True if the update was made for a case in this state, or has brought it there."""
        return state(found) in self.bases or (
            found is not None and found.content() == self.manifest.content()
        )

    def current(self) -> Manifest | None:
        """Return the current manifest of the case; raises `GoldenError` if the update was made for another."""
        found = read_manifest(self.target)
        if not self.fits(found):
            raise GoldenError(
                f"{self.folder} was proposed for another state of {self.target}, which has changed since: reject it "
                "and run pytest --update-golden=review again"
            )
        return found

    def difference(self) -> Difference:
        """Return the changes of accepting the whole update; raises `GoldenError` as `current` does."""
        base = self.current()
        return compare(Side(base, [self.target]), Side(self.manifest, [self.folder, self.target]))


def state(manifest: Manifest | None) -> str | None:
    """Return the checksum that identifies the state of a case; None if it is not recorded."""
    return None if manifest is None else manifest.sha256


def folder_of(store: GoldenStore, name: str) -> Path:
    """Return the folder of a case's pending update."""
    return store.root / PENDING / store.folder(name).name


def read_pending(store: GoldenStore, name: str) -> Pending | None:
    """Return the pending update of a case, or None; raises `GoldenError` when it is damaged."""
    folder = folder_of(store, name)

    def parse(tree: dict[str, Any]) -> Pending:
        if tree.keys() != _KEYS or tree["case"] != name:
            raise ValueError(f"it is not the update of {name!r}")
        bases, notes = tree["bases"], tree["notes"]
        if not all(base is None or isinstance(base, str) for base in bases):
            raise ValueError("its bases are no checksums")
        if not all(isinstance(note, str) for note in notes):
            raise ValueError("its notes are no texts")
        manifest = Manifest.from_json(tree["manifest"])
        return Pending(name, folder, store.folder(name), tuple(bases), manifest, tuple(notes))

    return read_sealed(folder / PROPOSAL, parse, f"reject it with regress golden reject {name}")


def write_pending(changes: Changes, pending: Pending) -> None:
    """Add the update to a transaction, after its truth files."""
    tree = {
        "case": pending.case,
        "bases": list(pending.bases),
        "manifest": pending.manifest.to_json(),
        "notes": list(pending.notes),
    }
    changes.write(pending.folder / PROPOSAL, [seal(tree).encode()])
    plan_sweep(changes, pending.folder, pending.manifest)


def discard(changes: Changes, folder: Path) -> None:
    """Remove an update: first the file that makes it one, then its truth files; other files stay."""
    changes.remove(folder / PROPOSAL)
    plan_sweep(changes, folder, None)
