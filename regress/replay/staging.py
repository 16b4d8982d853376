"""Updates of golden cases, prepared by whichever process of a test session comes first, and committed at its end.

The new state of a case is built as a copy beside the session's replays, so tests can be judged against it before
anything in the golden directory changes, and nothing changes if the session breaks off.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

from regress.compare.verdict import Status
from regress.dump.files import write_atomically
from regress.errors import RegressError
from regress.golden.case import GoldenCase
from regress.golden.commit import commit
from regress.golden.store import GoldenStore
from regress.replay.cache import TIMEOUT
from regress.replay.update import Change, propose

Selection = Collection[tuple[str, str]] | None
"""``(where, quantity)`` that may change; None for all of a case."""


@dataclass(frozen=True)
class Staged:
    """The state of a case after its update, the tensors that change of how many, or why it is refused."""

    case: GoldenCase | None
    changes: tuple[Change, ...] = ()
    compared: Mapping[str, int] = field(default_factory=dict)
    error: str | None = None


class Staging:
    """Updates below ``root``, which all processes of the session see.

    Args:
        everything: replace whatever differs in a bit, not only what drifted.
        selection: of a case's name, what the session's tests ask for.
    """

    def __init__(self, root: Path, *, everything: bool, selection: Callable[[str], Selection]) -> None:
        self.root = root
        self._everything = everything
        self._selection = selection
        self._known: dict[str, Staged] = {}

    def staged(self, case: GoldenCase) -> Staged:
        """The update of a case, computed unless any process did."""
        if case.name not in self._known:
            self.root.mkdir(parents=True, exist_ok=True)
            with FileLock(self.root / f"{case.name}.lock", timeout=TIMEOUT):
                if not (self.root / f"{case.name}.json").is_file():
                    self._stage(case)
            self._known[case.name] = read_staged(self.root, case.name)
        return self._known[case.name]

    def _stage(self, case: GoldenCase) -> None:
        from regress.replay.record import provenance_of

        row: dict[str, Any] = {"changes": [], "compared": {}, "error": None}
        wanted = self._selection(case.name)
        try:
            proposal = propose(
                case,
                self.root / f".{case.name}",
                everything=self._everything,
                selected=lambda where, quantity: wanted is None or (where, quantity) in wanted,
            )
            shutil.copytree(case.folder, self.root / case.name)
            commit(self.root / case.name, truth=proposal.changed, provenance=provenance_of(case))
            row |= {"changes": [asdict(change) for change in proposal.changes], "compared": proposal.compared}
        except RegressError as error:
            row["error"] = str(error)
        finally:
            shutil.rmtree(self.root / f".{case.name}", ignore_errors=True)
        write_atomically(self.root / f"{case.name}.json", [json.dumps(row).encode()])


def staged_names(root: Path) -> list[str]:
    """The cases for which an update was prepared."""
    return sorted(path.stem for path in root.glob("*.json"))


def read_staged(root: Path, name: str) -> Staged:
    """What was prepared for a case."""
    row = json.loads((root / f"{name}.json").read_text())
    if row["error"] is not None:
        return Staged(None, error=row["error"])
    changes = tuple(Change(**{**change, "status": Status(change["status"])}) for change in row["changes"])
    return Staged(GoldenStore(root).case(name), changes, row["compared"])


def changed_truth(staged: Staged) -> dict[str, dict[str, dict[str, Any]]]:
    """The tensors that change: ``where -> quantity -> name -> values``, None for one that disappears."""
    assert staged.case is not None
    truth: dict[str, dict[str, dict[str, Any]]] = {}
    for change in staged.changes:
        kept = staged.case.quantities(change.where) if change.where in staged.case.wheres() else []
        tensors = staged.case.truth_of(change.where, change.quantity) if change.quantity in kept else {}
        truth.setdefault(change.where, {}).setdefault(change.quantity, {})[change.name] = tensors.get(
            change.name
        )
    return truth
