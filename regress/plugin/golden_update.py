"""The end of ``pytest --update-golden``: staged cases become the golden ones, or pending ones to be reviewed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regress.replay.update import Change


@dataclass(frozen=True)
class UpdateRow:
    """One line of the table: a quantity of a case, and by how much it changed."""

    case: str
    quantity: str
    tensors: int
    multiple: float
    max_error: float
    statuses: str


def apply_staged(shared: Path, golden_dir: Path, *, review: bool) -> list[UpdateRow]:
    """Write what the session staged; returns what changed, quantity by quantity.

    With ``review`` the changes are laid beside the cases, to be accepted or rejected.
    """
    from regress.golden.commit import commit
    from regress.golden.pending import propose
    from regress.golden.store import GoldenStore
    from regress.replay.staging import changed_truth, read_staged, staged_names

    store = GoldenStore(golden_dir)
    rows: list[UpdateRow] = []
    for name in staged_names(shared):
        staged = read_staged(shared, name)
        if staged.case is None or not staged.changes:
            continue
        assert staged.case.manifest is not None
        write = propose if review else commit
        write(store.folder(name), truth=changed_truth(staged), provenance=staged.case.manifest.provenance)
        rows += _rows(name, staged.changes)
    return rows


def _rows(case: str, changes: Iterable[Change]) -> list[UpdateRow]:
    grouped: dict[str, list[Change]] = defaultdict(list)
    for change in changes:
        grouped[change.quantity].append(change)
    return [
        UpdateRow(
            case,
            quantity,
            len(found),
            max(change.multiple for change in found),
            max(change.max_error for change in found),
            ", ".join(dict.fromkeys(str(change.status) for change in found)),
        )
        for quantity, found in grouped.items()
    ]
