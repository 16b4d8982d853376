"""The end of an update: what tests have staged becomes golden, or waits beside the cases to be reviewed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from regress.plugin.rows import UpdateRow
from regress.report.numbers import pair

if TYPE_CHECKING:
    from regress.replay.staging import Staged
    from regress.replay.update import Change


def apply_staged(staged_dir: Path, golden_dir: Path, *, review: bool) -> list[UpdateRow]:
    """Write what a session staged; returns a row for each quantity of a case that changes."""
    from regress.golden.commit import commit
    from regress.golden.pending import propose
    from regress.golden.store import GoldenStore
    from regress.replay.staging import changed_truth, read_staged, staged_names

    store = GoldenStore(golden_dir)
    rows: list[UpdateRow] = []
    for name in staged_names(staged_dir):
        staged = read_staged(staged_dir, name)
        if staged.case is None or not staged.changes:
            continue
        assert staged.case.manifest is not None
        provenance = staged.case.manifest.provenance
        if review:
            propose(store, name, truth=changed_truth(staged), provenance=provenance)
        else:
            commit(store.folder(name), truth=changed_truth(staged), provenance=provenance)
        rows += _rows(name, staged, review)
    return rows


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
