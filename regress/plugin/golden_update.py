"""``--update-golden``: each test stages its new goldens, on whatever worker; one process writes them at the end.

Nothing in the golden directory changes before the session has ended well, and then all of it does, or nothing. What
changed is for ``git diff``, and for the table that the session prints.
"""

from __future__ import annotations

import hashlib
import shutil
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from regress.durable_files import write
from regress.errors import GoldenError
from regress.golden.golden_files import CHECKS, changing, read, unwritable
from regress.plugin.worker_rows import UpdateRow
from regress.report.number_format import pair

if TYPE_CHECKING:
    from regress.compare.verdicts.verdict import Verdict
    from regress.durable_files import Batch
    from regress.golden.stored_checks import StoredCheck
    from regress.golden.value_tree import Tree
    from regress.replay.drift_update import Staged

_SHOWN = 5


class StagedValues:
    """New values of one run of a test; values staged by an earlier run of it are dropped.

    Args:
        root: folder that all processes of the session see.
        worker: name of this process among them.
        test: id of the test.
    """

    __test__ = False

    def __init__(self, root: Path, worker: str, test: str) -> None:
        self._folder = root / CHECKS / worker / _digest(test)
        if self._folder.exists():
            shutil.rmtree(self._folder)

    def put(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Stage the new file of a check; `path` is within the golden directory."""
        try:
            write(self._folder / path, chunks)
        except OSError as error:
            raise unwritable(self._folder / path, error) from error


def staged_checks(root: Path, failed: Collection[str]) -> dict[str, bytes]:
    """Return the new file of each check by its path within the golden directory.

    Args:
        failed: ids of the tests whose values are dropped.

    Raises:
        GoldenError: if two workers ran the same test and differ.
    """
    dropped = {_digest(test) for test in failed}
    found: dict[str, bytes] = {}
    for folder in sorted((root / CHECKS).glob("*/*")):
        if folder.name in dropped:
            continue
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            path, data = file.relative_to(folder).as_posix(), read(file)
            if found.setdefault(path, data) != data:
                raise GoldenError(
                    f"two workers ran the test of {path} and got different values: run it with -n 0"
                )
    return found


def _digest(test: str) -> str:
    return hashlib.sha256(test.encode("utf-8", "surrogatepass")).hexdigest()[:16]


@dataclass(frozen=True)
class SessionFacts:
    """Facts from the reports of the session's tests.

    Attributes:
        rows: id of a test, and the row of a check that it has staged.
        failed: ids of the tests that failed in some phase.
    """

    rows: Sequence[tuple[str, UpdateRow]] = ()
    failed: Collection[str] = ()


@dataclass
class Applied:
    """Result of an update.

    Attributes:
        rows: one row for each changed check, and for each changed quantity of a case.
        problems: a sentence for each failure.
        notes: further notes.
    """

    rows: list[UpdateRow] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def apply_staged(staged_dir: Path, golden_dir: Path, facts: SessionFacts) -> Applied:
    """Write what a session staged, all or nothing, without the values of tests that failed.

    A case whose update is refused does not prevent the others from being written.
    """
    found = Applied(notes=list(_dropped(facts)))
    try:
        checks, cases = staged_checks(staged_dir, facts.failed), _staged_cases(staged_dir)
        if not checks and not cases:
            return found
        try:
            golden_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(golden_dir, error) from error
        from regress.golden.stored_checks import other_file

        with changing(golden_dir) as batch:
            for path, data in checks.items():
                batch.write(golden_dir / path, [data])
                batch.remove(golden_dir / other_file(path))
            for name, staged in cases.items():
                try:
                    found.rows += _take_over(batch, name, staged)
                except GoldenError as error:
                    found.problems.append(f"the update of {name} was not written: {error}")
    except GoldenError as error:
        return Applied(problems=[f"the update was not completed: {error}"], notes=found.notes)
    found.rows += _check_rows(facts, checks)
    return found


def _dropped(facts: SessionFacts) -> Iterable[str]:
    """Yield a note on the failed tests, which would otherwise have written a golden."""
    tests = sorted({row.owner for test, row in facts.rows if test in facts.failed})
    if tests:
        more = f" and {len(tests) - _SHOWN} more" if len(tests) > _SHOWN else ""
        yield f"new goldens of tests that failed were not written: {', '.join(tests[:_SHOWN])}{more}"


def _staged_cases(staged_dir: Path) -> dict[str, Staged]:
    """Return the cases that an update changes; without any, torch is not needed here."""
    if not any(staged_dir.glob("*.json")):
        return {}
    from regress.replay.drift_update import read_staged, staged_names

    found = {name: read_staged(staged_dir, name) for name in staged_names(staged_dir)}
    return {name: staged for name, staged in found.items() if staged.case is not None and staged.changes}


def _take_over(batch: Batch, name: str, staged: Staged) -> Iterable[UpdateRow]:
    """Add the update of a case to a batch, and return its rows; if it is refused, nothing is added."""
    from regress.durable_files import Batch
    from regress.golden.case_update import take_over

    assert staged.case is not None
    own = Batch(batch.root)
    take_over(own, batch.root / name, staged.case.folder, staged.base)
    batch.add(own)
    return _case_rows(name, staged)


def _case_rows(case: str, staged: Staged) -> Iterable[UpdateRow]:
    grouped = defaultdict(list)
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
        )


def _check_rows(facts: SessionFacts, written: Collection[str]) -> Iterable[UpdateRow]:
    """Return the rows of the checks that were written; the last run of a test counts."""
    from regress.golden.stored_checks import check_path, without_suffix

    written = {without_suffix(file) for file in written}
    last = {check_path(row.owner, row.name): row for test, row in facts.rows if test not in facts.failed}
    return (row for path, row in last.items() if path in written)


def check_row(new: StoredCheck, old: StoredCheck | None, verdicts: Sequence[Verdict]) -> UpdateRow:
    """Return the row of a new golden.

    Args:
        verdicts: verdicts on the new value against the old one; empty if there is no old one.
    """
    from regress.golden.value_tree import CONTAINERS
    from regress.plugin.value_display import show_briefly

    failed = [verdict for verdict in verdicts if not verdict.ok] or [v for v in verdicts if v.max_error]
    leaves = sum(node[0] not in CONTAINERS for node in new.value.nodes.values())
    row = UpdateRow(new.test, new.name, "new", leaves, leaves)
    if old is None:
        return replace(row, new=show_briefly(new.value))
    if not failed:  # only tolerance, reason, or bits that compare equal
        return replace(row, status="rewritten", changed=0, total=len(verdicts))
    valued = [verdict for verdict in failed if verdict.worst is not None] or failed
    furthest = max(valued, key=lambda verdict: verdict.multiple)
    worst = furthest.worst
    return replace(
        row,
        status=", ".join(dict.fromkeys(str(v.status) if not v.ok else "within tolerance" for v in failed)),
        changed=len(failed),
        total=len(verdicts),
        max_error=max(verdict.max_error for verdict in failed),
        multiple=furthest.multiple,
        old="" if worst is None else f"{worst.golden:.6g}",
        new="" if worst is None else f"{worst.actual:.6g}",
    )


def refuse_nonfinite(value: Tree, name: str) -> None:
    """Raise `GoldenError` naming the first NaN or infinity, which a golden may hold only if asked for."""
    from regress.dump.numpy_arrays import is_float

    for path, array in value.tensors.items():
        bad = ~np.isfinite(array.astype(np.float64)) if is_float(array.dtype) else np.zeros(1, bool)
        if bad.any():
            index = [int(i) for i in np.unravel_index(int(bad.argmax()), array.shape)]
            raise GoldenError(f"""the new value of {name!r} is refused: {path} is {float(array[tuple(index)])} at
            {index} ({int(bad.sum())} of {array.size} elements are not finite); find what produced it, or pass
            nonfinite=True if that is right""")


def refuse_unrepeatable(verdicts: Sequence[Verdict], name: str) -> None:
    """Raise `GoldenError` when a second run of the same function returned another value."""
    failed = [verdict for verdict in verdicts if not verdict.ok]
    if failed:
        first = failed[0]
        raise GoldenError(f"""the new value of {name!r} is refused: two runs of its function differ ({first.status},
        {first.name}, by {first.max_error:.3g}); seed what is random in it, or give a tolerance and its reason""")
