"""One call of `regress.check`, from the value to its verdicts or to its new golden."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from regress.compare.verdicts.tolerance import Tolerance
from regress.compare.verdicts.verdict import Verdict
from regress.errors import GoldenError
from regress.golden.golden_directory import GoldenStore
from regress.golden.stored_checks import StoredCheck, read_check
from regress.golden.value_tree import Tree
from regress.plugin.golden_comparison import compare
from regress.plugin.golden_update import StagedValues, check_row, refuse_nonfinite, refuse_unrepeatable
from regress.plugin.session_settings import Settings
from regress.plugin.worker_rows import UpdateRow


@dataclass(frozen=True)
class Outcome:
    """Result of a call.

    Attributes:
        verdicts: on every leaf, the gravest first; none if there is no golden.
        golden: golden that the value was compared with.
        row: row of the value staged to become golden, if any.
    """

    verdicts: list[Verdict]
    golden: StoredCheck | None
    row: UpdateRow | None = None


@dataclass(frozen=True)
class Call:
    """Request of a test.

    Attributes:
        new: the value as it would be stored, without provenance.
        tolerance: with the factor of the session.
        again: computes the value once more, if it came from a function.
        nonfinite: True if NaN and infinities may become golden.
    """

    new: StoredCheck
    tolerance: Tolerance
    again: Callable[[], Any] | None
    nonfinite: bool

    def conclude(
        self, settings: Settings, provenance: Callable[[], Mapping[str, Any]], staged: StagedValues | None
    ) -> Outcome:
        """Compare with the golden; in an update, stage the new value with its provenance if it is to become golden.

        Raises `GoldenError` when the golden is damaged, or the new value may not become one.
        """
        old = self._golden(settings)
        verdicts = [] if old is None else self._compare(self.new.value, old.value)
        if settings.update is None or staged is None:
            return Outcome(verdicts, old)
        if not self._replaces(old, verdicts, settings):
            return Outcome(verdicts, old)
        if not self.nonfinite:
            refuse_nonfinite(self.new.value, self.new.name)
        if self.again is not None:
            refuse_unrepeatable(self._compare(Tree.of(self.again()), self.new.value), self.new.name)
        whole = replace(self.new, provenance=provenance())
        staged.put(whole.file, [whole.encode()])
        return Outcome(verdicts, old, check_row(whole, old, verdicts))

    def _golden(self, settings: Settings) -> StoredCheck | None:
        store = GoldenStore(settings.golden_dir)
        try:
            return read_check(store.root, self.new.path)
        except GoldenError:
            if settings.update is None or not settings.update.all:
                raise
            return None  # rewriting everything repairs a damaged golden

    def _replaces(self, old: StoredCheck | None, verdicts: list[Verdict], settings: Settings) -> bool:
        if old is None or not all(verdict.ok for verdict in verdicts):
            return True
        return settings.update is not None and settings.update.all and not self.new.same(old)

    def _compare(self, actual: Tree, golden: Tree) -> list[Verdict]:
        return compare(actual, golden, self.tolerance, self.new.name)
