"""Updates of golden cases, prepared by the first process of a test session, and committed at its end.

The new state of a case is built as a copy beside the session's replays, so tests can be judged against it before
anything in the golden directory changes, and nothing changes if the session breaks off.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from regress.compare.verdicts.overrides import Overrides
from regress.compare.verdicts.verdict import Status
from regress.dump.files import write_atomically
from regress.golden.case import GoldenCase
from regress.golden.commit import commit
from regress.golden.store import GoldenStore
from regress.inputs import parse_json, read_bytes
from regress.replay.interprocess_lock import interprocess_lock, stated
from regress.replay.update import Change, propose

Selection = Collection[tuple[str, str]]
"""``(where, quantity)`` of the tests of a session; ``coverage`` stands for quantities without a test."""


@dataclass(frozen=True)
class Staged:
    """State of a case after its update, with the tensors that change out of how many, or the reason it is refused.

    ``looked`` holds the updates and quantities that the session asked for, whether they change or not.
    """

    case: GoldenCase | None
    changes: tuple[Change, ...] = ()
    compared: Mapping[str, int] = field(default_factory=dict)
    looked: frozenset[tuple[str, str]] = frozenset()
    error: str | None = None


class Staging:
    """Updates below ``root``, which all processes of the session see.

    Args:
        everything: replace whatever differs in a bit, not only what drifted.
        selection: items that the session's tests ask for, by a case's name.
        scale: factor on the tolerances.
        overrides: tolerances that the project sets by hand.
    """

    def __init__(
        self,
        root: Path,
        *,
        everything: bool,
        selection: Callable[[str], Selection],
        scale: float,
        overrides: Overrides | None = None,
    ) -> None:
        self.root = root
        self._scale = scale
        self._overrides = overrides
        self._everything = everything
        self._selection = selection
        self._known: dict[str, Staged] = {}

    def staged(self, case: GoldenCase) -> Staged:
        """Return the update of a case, which is computed unless another process did it."""
        if case.name not in self._known:
            self.root.mkdir(parents=True, exist_ok=True)
            with interprocess_lock(self.root / case.name, f"the update of {case.name}"):
                if not (self.root / f"{case.name}.json").is_file():
                    self._stage(case)
            self._known[case.name] = read_staged(self.root, case.name)
        return self._known[case.name]

    def _stage(self, case: GoldenCase) -> None:
        from regress.replay.record import provenance_of

        row: dict[str, Any] = {"changes": [], "compared": {}, "looked": [], "error": None}
        wanted = self._selection(case.name)
        try:
            proposal = propose(
                case,
                self.root / f".{case.name}",
                everything=self._everything,
                scale=self._scale,
                overrides=self._overrides,
                selected=lambda where, quantity: _selected(case, wanted, where, quantity),
            )
            _copy(case.folder, self.root / case.name)
            commit(self.root / case.name, truth=proposal.changed, provenance=provenance_of(case))
            changes = [asdict(change) for change in proposal.changes]
            row |= {"changes": changes, "compared": proposal.compared, "looked": proposal.looked}
        except Exception as error:  # any error would occur again with each replay of the case
            row["error"] = stated(error)
        finally:
            shutil.rmtree(self.root / f".{case.name}", ignore_errors=True)
        write_atomically(self.root / f"{case.name}.json", [json.dumps(row).encode()])


def _selected(case: GoldenCase, wanted: Selection, where: str, quantity: str) -> bool:
    """Return True if a quantity may change: it has a test, or it is new and the coverage of its update is tested."""
    if (where, quantity) in wanted:
        return True
    recorded = case.quantities(where) if where in case.wheres() else []
    return quantity not in recorded and (where, "coverage") in wanted


def _copy(folder: Path, target: Path) -> None:
    """Copy a case so that it can be changed, whatever the permissions of the golden directory."""
    shutil.rmtree(target, ignore_errors=True)  # a killed process may have left a part
    shutil.copytree(folder, target, copy_function=shutil.copyfile)
    for path in (target, *_folders(target)):
        path.chmod(0o700)


def _folders(root: Path) -> Iterator[Path]:
    return (path for path in root.rglob("*") if path.is_dir())


def staged_names(root: Path) -> list[str]:
    """Return the cases for which an update was prepared."""
    return sorted(path.stem for path in root.glob("*.json") if path.is_file())  # a case may be called so, too


def read_staged(root: Path, name: str) -> Staged:
    """Return the prepared update of a case."""
    row = parse_json(read_bytes(root / f"{name}.json"), finite=False)
    if row["error"] is not None:
        return Staged(None, error=row["error"])
    changes = tuple(Change(**{**change, "status": Status(change["status"])}) for change in row["changes"])
    looked = frozenset((where, quantity) for where, quantity in row["looked"])
    return Staged(GoldenStore(root).case(name), changes, row["compared"], looked)


def changed_truth(staged: Staged) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the tensors that change: ``where -> quantity -> name -> values``, None for one that disappears."""
    assert staged.case is not None
    truth: dict[str, dict[str, dict[str, Any]]] = {}
    for change in staged.changes:
        kept = staged.case.quantities(change.where) if change.where in staged.case.wheres() else []
        tensors = staged.case.truth_of(change.where, change.quantity) if change.quantity in kept else {}
        truth.setdefault(change.where, {}).setdefault(change.quantity, {})[change.name] = tensors.get(
            change.name
        )
    return truth
