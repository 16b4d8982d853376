"""The end of an update: what tests have staged becomes golden, or waits beside the cases to be reviewed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from regress.errors import RegressError
from regress.plugin.rows import UpdateRow
from regress.report.numbers import pair

if TYPE_CHECKING:
    from regress.golden.store import GoldenStore
    from regress.replay.staging import Staged
    from regress.replay.update import Change


@dataclass
class Applied:
    """What became of the updates: a row for each quantity of a case that changed, a sentence for each failure."""

    rows: list[UpdateRow] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def apply_staged(staged_dir: Path, golden_dir: Path, *, review: bool) -> Applied:
    """Write what a session staged, case by case: one that cannot be written keeps no other from it."""
    from regress.golden.store import GoldenStore
    from regress.replay.staging import read_staged, staged_names

    found = Applied()
    for name in staged_names(staged_dir):
        staged = read_staged(staged_dir, name)
        if staged.case is None:
            continue
        try:
            _write(GoldenStore(golden_dir), name, staged, review)
        except RegressError as error:
            found.problems.append(f"the update of {name} was not written: {error}")
        else:
            found.rows += _rows(name, staged, review)
    return found


def _write(store: GoldenStore, name: str, staged: Staged, review: bool) -> None:
    from regress.golden.commit import commit
    from regress.golden.pending import propose
    from regress.replay.staging import changed_truth

    _withdraw(store, name, staged)
    if not staged.changes:
        return
    assert staged.case is not None
    assert staged.case.manifest is not None
    provenance = staged.case.manifest.provenance
    if review:
        propose(store, name, truth=changed_truth(staged), provenance=provenance)
    else:
        commit(store.folder(name), truth=changed_truth(staged), provenance=provenance)


def _withdraw(store: GoldenStore, name: str, staged: Staged) -> None:
    """Drop what an earlier session proposed for what this one has looked at: its values are others, or right."""
    from regress.golden.manifest import read_manifest
    from regress.golden.pending import pending_names, pending_of, reject
    from regress.golden.selection import items

    if name not in pending_names(store):
        return
    pending, base = pending_of(store, name), read_manifest(store.folder(name))
    if pending.fits(base) and (outdated := items(base, pending.manifest) & staged.looked):
        reject(store, name, ["/".join(item) for item in sorted(outdated)])


def _rows(case: str, staged: Staged, pending: bool) -> Iterable[UpdateRow]:
    grouped: dict[str, list[Change]] = defaultdict(list)
    for change in staged.changes:
        grouped[change.quantity].append(change)
    for quantity, found in grouped.items():
        worst = max(found, key=lambda change: change.multiple)
        old, new = ("", "") if worst.old is None or worst.new is None else pair(worst.old, worst.new)
        yield UpdateRow(
            case,
            quantity,
            ", ".join(dict.fromkeys(str(change.status) for change in found)),
            len(found),
            staged.compared.get(quantity, len(found)),
            max(change.max_error for change in found),
            worst.multiple,
            old,
            new,
            pending,
        )
