"""Update of golden cases: computed again, where only what drifted beyond its tolerance changes.

`propose` says what would change. `Staging` prepares the new state of a case once in a test session, as a changed copy
beside the session's replays: tests are judged against it, and the plugin takes it over when the session ends.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from regress.compare.alignment.canonical_projection import Projection
from regress.compare.quantities import METRICS, Kind, QuantitySource, quantity_named
from regress.compare.verdicts.tensor_judge import judge_tensor
from regress.compare.verdicts.tolerance import EXACT, Tolerance
from regress.compare.verdicts.tolerance_overrides import Overrides
from regress.compare.verdicts.verdict import Status, Verdict
from regress.dump.dump_files import write_atomically
from regress.dump.numpy_arrays import Array, dtype_name, raw
from regress.golden.case_update import check_finite, commit
from regress.golden.golden_case import GoldenCase
from regress.golden.golden_directory import GoldenStore
from regress.golden.golden_files import MANIFEST, parse_where
from regress.replay.case_truth import Truth, compute_truth, flat, provenance_of, require_case_signal
from regress.replay.interprocess_lock import interprocess_lock, stated
from regress.replay.replay_judge import stored_tolerances
from regress.replay.test_matrix import Replay
from regress.replay.variant import Precision
from regress.replay.variant_table import BASE
from regress.untrusted_files import parse_json, read_bytes

Selection = Collection[tuple[str, str]]
"""``(where, quantity)`` of the tests of a session; ``coverage`` stands for quantities without a test."""


@dataclass(frozen=True)
class Change:
    """One golden tensor that is replaced, added or removed; ``old`` and ``new`` where it changes most."""

    where: str
    quantity: str
    name: str
    status: Status
    multiple: float
    max_error: float
    old: float | None
    new: float | None


@dataclass
class Proposal:
    """Result of an update before it is written.

    Attributes:
        truth: the values after it, of all updates and quantities.
        changed: the tensors that change, by update and quantity; None for one that disappears.
        changes: tensor by tensor, in the order of computation.
        compared: number of compared tensors, by quantity.
    """

    truth: Truth = field(default_factory=dict)
    changed: dict[str, dict[str, dict[str, Array | None]]] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    compared: dict[str, int] = field(default_factory=dict)


def propose(
    case: GoldenCase,
    workspace: Path,
    *,
    everything: bool = False,
    selected: Callable[[str, str], bool] = lambda *_: True,
    scale: float = 1.0,
    overrides: Overrides | None = None,
) -> Proposal:
    """Recompute the golden values of a case.

    Args:
        everything: replace whatever differs in a bit, not only what drifted beyond its tolerance.
        selected: predicate of (``where``, ``quantity``): those that may change; the others keep their old values.
        scale: factor on the tolerances.
        overrides: tolerances that the project sets by hand.

    Raises:
        RegressError: if the values are not finite, differ between two runs, or carry too little signal.
    """
    new = compute_truth(case, workspace)
    for (where, quantity, name), array in flat(new).items():
        check_finite(array, f"case {case.name}: {quantity} {name} at {where}")
    require_case_signal(case, new)
    old: Truth = {where: dict(case.truth(where)) for where in case.wheres()}
    frames = {update.where: update.frame for update in Replay(case, BASE, Precision.FLOAT64).plan}
    found = Proposal()
    bound = stored_tolerances(case, Precision.FLOAT64, scale, overrides)
    for where in dict.fromkeys([*new, *old]):
        golden = Projection(old[where], frames[where]) if where in old and where in frames else None
        for quantity in dict.fromkeys([*new.get(where, {}), *old.get(where, {})]):
            before, after = old.get(where, {}).get(quantity, {}), new.get(where, {}).get(quantity, {})
            kept = dict(before)
            for name in dict.fromkeys([*before, *after]) if selected(where, quantity) else ():
                found.compared[quantity] = found.compared.get(quantity, 0) + 1
                a, b = before.get(name), after.get(name)
                verdict = _judge((bound(quantity) or EXACT).of(name), where, quantity, name, a, b, golden)
                if verdict.ok and not (everything and not _same(a, b)):
                    continue
                found.changes.append(_change(where, verdict))
                found.changed.setdefault(where, {}).setdefault(quantity, {})[name] = b
                kept.pop(name, None)
                if b is not None:
                    kept[name] = b
            if kept:
                found.truth.setdefault(where, {})[quantity] = kept
    return found


def _judge(
    tolerance: Tolerance,
    where: str,
    quantity: str,
    name: str,
    old: Array | None,
    new: Array | None,
    golden: Projection | None,
) -> Verdict:
    place, scale = parse_where(where), None
    assert place is not None
    if golden is not None and old is not None:
        if quantity_named(quantity).kind is Kind.SHARE:
            scale = golden.share_scale(name)
        elif quantity in METRICS:
            scale = golden.scale(QuantitySource(quantity, name, quantity, name))
    return judge_tensor(
        new,
        old,
        tolerance,
        quantity=quantity,
        name=name,
        place=place.of_update,
        scale=scale,
        dtype=None if old is None else dtype_name(old.dtype),
    )


def _change(where: str, found: Verdict) -> Change:
    values = (None, None) if found.worst is None else (found.worst.golden, found.worst.actual)
    return Change(where, found.quantity, found.name, found.status, found.multiple, found.max_error, *values)


def _same(old: Array | None, new: Array | None) -> bool:
    return old is not None and new is not None and raw(old) == raw(new)


@dataclass(frozen=True)
class Staged:
    """State of a case after its update, with the tensors that change out of how many, or the reason it is refused.

    Attributes:
        case: a changed copy of the case; None if its update is refused.
        base: manifest of the case from which it was made.
    """

    case: GoldenCase | None
    changes: tuple[Change, ...] = ()
    compared: Mapping[str, int] = field(default_factory=dict)
    base: bytes = b""
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
        self._selection = selection
        self._settings: dict[str, Any] = {"everything": everything, "scale": scale, "overrides": overrides}
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
        selection, work = self._selection(case.name), self.root / f".{case.name}"
        row: dict[str, Any] = {"changes": [], "compared": {}, "error": None}
        try:
            found = propose(case, work, selected=partial(_selected, case, selection), **self._settings)
            _copy(case.folder, self.root / case.name)
            shutil.copyfile(self.root / case.name / MANIFEST, self.root / f"{case.name}.base")
            commit(self.root / case.name, truth=found.changed, provenance=provenance_of(case))
            row |= {"changes": [asdict(change) for change in found.changes], "compared": found.compared}
        except Exception as error:  # any error would occur again with each replay of the case
            row["error"] = stated(error)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        write_atomically(self.root / f"{case.name}.json", [json.dumps(row).encode()])


def _selected(case: GoldenCase, selection: Selection, where: str, quantity: str) -> bool:
    """Return True if a quantity may change: it has a test, or it is new and the coverage of its update is tested."""
    new = where not in case.wheres() or quantity not in case.quantities(where)
    return (where, quantity) in selection or (new and (where, "coverage") in selection)


def _copy(folder: Path, target: Path) -> None:
    """Copy a case so that it can be changed, whatever the permissions of the golden directory."""
    shutil.rmtree(target, ignore_errors=True)  # a killed process may have left a part
    shutil.copytree(folder, target, copy_function=shutil.copyfile)
    for path in (target, *(path for path in target.rglob("*") if path.is_dir())):
        path.chmod(0o700)


def staged_names(root: Path) -> list[str]:
    """Return the cases for which an update was prepared."""
    return sorted(path.stem for path in root.glob("*.json") if path.is_file())  # a case may be called so, too


def read_staged(root: Path, name: str) -> Staged:
    """Return the prepared update of a case."""
    row = parse_json(read_bytes(root / f"{name}.json"), finite=False)
    if row["error"] is not None:
        return Staged(None, error=row["error"])
    changes = tuple(Change(**{**change, "status": Status(change["status"])}) for change in row["changes"])
    base = read_bytes(root / f"{name}.base")
    return Staged(GoldenStore(root).case(name), changes, row["compared"], base)
