"""Pending updates: proposed changes of a case, kept beside it until they are accepted or rejected.

A case has at most one: further proposals for the same state of the case are merged into it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace as changed
from pathlib import Path

from regress.dump.jsontext import Json
from regress.errors import GoldenError
from regress.golden.commit import check_case, plan_case, plan_truth
from regress.golden.manifest import Manifest, read_manifest
from regress.golden.names import PENDING, PROPOSAL
from regress.golden.packed import read_stored
from regress.golden.proposal import Pending, discard, folder_of, read_pending, state, write_pending
from regress.golden.selection import Item, blend, items, select
from regress.golden.store import GoldenStore
from regress.golden.transaction import Changes, transaction
from regress.golden.update import Chunks, NewTolerances, NewTruth, Update, changed_inputs


def propose(
    store: GoldenStore,
    name: str,
    *,
    truth: NewTruth | None = None,
    tolerances: NewTolerances | None = None,
    inputs: Iterable[str] | None = None,
    provenance: Mapping[str, Json],
    replace: bool = False,
    notes: Sequence[str] = (),
) -> Pending | None:
    """Keep changes of a case for review; the arguments are those of `commit`, and notes for the reviewer.

    Returns the pending update, earlier proposals included, or None when nothing would change. Raises `GoldenError`
    for whatever `commit` would refuse.
    """
    update = Update(provenance, truth or {}, tolerances or {}, inputs, replace)
    with transaction(store.root) as changes:
        return plan_proposal(changes, store, name, update, notes)


def plan_proposal(
    changes: Changes,
    store: GoldenStore,
    name: str,
    update: Update,
    notes: Sequence[str] = (),
    outdated: Collection[Item] = (),
) -> Pending | None:
    """Add to a transaction the files that keep an update for review; see `propose`.

    Args:
        outdated: items whose earlier proposals are dropped first.
    """
    target, folder = store.folder(name), folder_of(store, name)
    check_case(target)
    base, earlier = read_manifest(target), read_pending(store, name)
    if earlier is not None and not earlier.fits(base):
        earlier = None
    start = base
    if earlier is not None:
        start = blend(base, earlier.manifest, items(base, earlier.manifest) - set(outdated))
        if base is not None and base.content() == start.content():
            earlier = None
    new, files = update.applied(target, start, [folder, target])
    if base is not None and base.content() == new.content():
        discard(changes, folder)
        return None
    lines = dict.fromkeys((*(() if earlier is None else earlier.notes), *notes))
    pending = Pending(name, folder, target, (state(base),), new, tuple(lines))
    here = set() if base is None else base.files
    plan_truth(changes, folder, {path: chunks for path, chunks in files.items() if path not in here})
    write_pending(changes, pending)
    return pending


def pending_names(store: GoldenStore) -> list[str]:
    """Return the names of cases with a pending update, intact or not."""
    return sorted(path.parent.name for path in (store.root / PENDING).glob(f"*/{PROPOSAL}"))


def list_pending(store: GoldenStore) -> list[Pending]:
    """Return all pending updates; raises `GoldenError` naming a damaged one."""
    return [pending_of(store, name) for name in pending_names(store)]


def pending_of(store: GoldenStore, name: str) -> Pending:
    """Return the pending update of a case; raises `GoldenError` when there is none or it is damaged."""
    found = read_pending(store, name)
    if found is None:
        known = ", ".join(pending_names(store)) or "none"
        raise GoldenError(f"case {name!r} has no pending update: cases with one are {known}")
    return found


def accept(store: GoldenStore, name: str, patterns: Sequence[str] = ()) -> list[Path]:
    """Commit a pending update, or its quantities that match a pattern; the rest stays pending.

    A pattern (`gradient`, `step_000001/*`, `tolerances/kl`) is matched with the name of a quantity, and with
    update and name. Returns the files written in the case. Raises `GoldenError` when the case has changed
    since the proposal, when its inputs are not those of the update, or when nothing matches.
    """
    with transaction(store.root) as changes:
        pending = pending_of(store, name)
        base = pending.current()
        new = blend(base, pending.manifest, select(name, base, pending.manifest, patterns))
        _check_inputs(pending)
        plan_case(changes, pending.target, base, new, _new_files(pending, base, new))
        written = changes.paths()
        if items(new, pending.manifest):  # the rest applies to the new state of the case
            after = base if base is not None and base.content() == new.content() else new
            write_pending(changes, changed(pending, bases=(state(after),)))
        else:
            discard(changes, pending.folder)
        return written


def _new_files(pending: Pending, base: Manifest | None, new: Manifest) -> dict[str, Chunks]:
    """Return the truth files that the case lacks, every byte verified."""
    here = set() if base is None else base.files
    entries = [entry for row in new.truth.values() for entry in row.values() if entry.file not in here]
    return {entry.file: [read_stored([pending.folder], entry.file, entry.stamp)[1]] for entry in entries}


def _check_inputs(pending: Pending) -> None:
    for path in changed_inputs(pending.target, pending.manifest.inputs):
        raise GoldenError(
            f"{pending.target / path} is not the file that the pending update was made from: restore it, or reject the "
            "update and run pytest --update-golden=review again"
        )


def reject(store: GoldenStore, name: str, patterns: Sequence[str] = ()) -> None:
    """Drop a pending update, damaged or not, or its quantities that match a pattern."""
    with transaction(store.root) as changes:
        if not patterns and name in pending_names(store):
            discard(changes, folder_of(store, name))
            return
        pending = pending_of(store, name)
        plan_rejection(changes, pending, select(name, pending.current(), pending.manifest, patterns))


def plan_rejection(changes: Changes, pending: Pending, dropped: Collection[Item]) -> None:
    """Add to a transaction the changes that drop some items of a pending update."""
    base = pending.current()
    kept = blend(base, pending.manifest, items(base, pending.manifest) - set(dropped))
    if base is not None and base.content() == kept.content():
        discard(changes, pending.folder)
    else:
        write_pending(changes, changed(pending, manifest=kept))
