"""Options of a comparison, and the work planned for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from regress.compare.dumps.byte_verification import IntegrityUnit
from regress.compare.dumps.comparison_unit import Unit
from regress.compare.dumps.loss_shares import ShareUnit
from regress.compare.dumps.rollout_comparison import RolloutUnit
from regress.compare.dumps.tensor_selection import Selection
from regress.compare.dumps.tolerance_bounds import Bounds
from regress.compare.single_dump_units import SingleUnit
from regress.compare.verdicts.verdict import Verdict

AnyUnit = Unit | ShareUnit | RolloutUnit | SingleUnit | IntegrityUnit


@dataclass(frozen=True)
class Options:
    """Scope and strictness of a comparison.

    Attributes:
        steps: the first and the last; None for all that both dumps have.
        ranks, micros: number of ranks of the actual dump to compare, and of microbatches of each; None for all.
        common: quantities and tensors that one side alone has are listed, and are not a difference.
        verify: verify the bytes that are read by the checksums of their dump.
    """

    steps: tuple[int, int] | None = None
    ranks: int | None = None
    micros: int | None = None
    bounds: Bounds = field(default_factory=Bounds)
    only: Selection = field(default_factory=Selection)
    common: bool = False
    verify: bool = True

    @property
    def everywhere(self) -> bool:
        """True if neither tensors nor ranks nor microbatches are chosen."""
        return not self.only.patterns and self.ranks is None and self.micros is None

    def has(self, step: int) -> bool:
        """Return True if a step is asked for."""
        return self.steps is None or self.steps[0] <= step <= self.steps[1]


@dataclass
class Planned:
    """The work of a comparison.

    Attributes:
        units: in the order of computation.
        verdicts: verdicts that need headers only: missing, superfluous or doubled parts.
        golden_only, actual_only: samples without a counterpart, in words.
        notes: unknown facts and omissions, a sentence each.
        problems: parts that could not be compared, a sentence each.
    """

    units: list[AnyUnit] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    golden_only: list[str] = field(default_factory=list)
    actual_only: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
