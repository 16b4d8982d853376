"""Comparison of one record of the actual dump with the golden records of the same tokens or tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from regress.compare.alignment.aligned_tensor import Aligned
from regress.compare.alignment.local_shard import local_shard
from regress.compare.alignment.record_keys import key_of, norm_of
from regress.compare.dumps.adamw_rounding import AdamWRounding
from regress.compare.dumps.clip_boundary import ClipBoundary
from regress.compare.dumps.comparison_unit import Unit
from regress.compare.dumps.moe_routing import ExpertRouting
from regress.compare.dumps.scaled_verdicts import Defect, Finding
from regress.compare.dumps.temperature_verdict import judge_temperatures
from regress.compare.dumps.unit_work import Admission, UnitWork, opened
from regress.compare.quantities import EVERYWHERE, UPDATE_TYPES, QuantitySource
from regress.compare.verdicts.tensor_judge import judge_tensor
from regress.compare.verdicts.verdict import Status
from regress.errors import CompareError

_HIDDEN = (
    "derivatives by log-probs and entropies that rounding hides (where token_gradient tells recoverable as 0, as where "
    "the probability of a token is next to 1) were not compared"
)
ADMISSIONS: Mapping[str, type[Admission]] = {
    "token_gradient": ClipBoundary,
    "activations": ExpertRouting,
    "param": AdamWRounding,
}
"""What rounding may decide, by quantity."""


def compare_unit(unit: Unit, scales: Mapping[tuple[str, str], float] | None = None) -> list[Finding]:
    """Compare one record.

    Args:
        scales: ``(quantity, name)`` -> largest golden value anywhere; by default that of the values at hand.

    Raises:
        DumpError: if a file cannot be read.
    """
    comparison = _UnitComparison(opened(unit, scales))
    whole = unit.elementwise or unit.record_type in UPDATE_TYPES
    return [*(comparison.whole() if whole else comparison.tokens())]


@dataclass(frozen=True)
class _UnitComparison:
    work: UnitWork

    def whole(self) -> Iterator[Finding]:
        """Yield findings on full tensors and shards of them."""
        work, records = self.work, self.work.records
        key = key_of(records.actual)
        for source in work.sources():
            known = work.golden_shards(source)
            try:
                actual = local_shard(key, records.actual, source.tensor)
            except CompareError as error:
                yield work.plain(Status.COVERAGE, source, str(error))
                continue
            shards = [shard for shard in known if shard.layout.shape == actual.layout.shape]
            if shards:
                yield self._admitted(source, work.beside(source, actual, shards))
            elif known:
                part = "" if actual.layout.is_whole else "a part of "
                detail = f"golden {list(known[0].layout.shape)}, actual {part}{list(actual.layout.shape)}"
                yield work.plain(Status.SHAPE, source, detail)
        yield from self._grad_norm()

    def tokens(self) -> Iterator[Finding]:
        """Yield findings on tensors of tokens."""
        work, unit = self.work, self.work.unit
        for source, found in work.aligned():
            if isinstance(found, Defect):
                yield replace(work.plain(Status.SHAPE, source, found), problem=f"{unit.place}: {found}")
            elif isinstance(found, str):
                yield work.plain(Status.SHAPE, source, found)
            else:
                finding = self._admitted(source, found)
                hides = source.quantity in EVERYWHERE and work.records.hidden.size > 0
                yield replace(finding, note=_HIDDEN) if hides and not finding.note else finding
        if unit.record_type == "token_gradient" and unit.only.has("token_gradient", "temperature"):
            about: dict[str, Any] = {"place": unit.place, "suffix": unit.suffix}
            records, tolerance = work.records, work.tolerance_of("token_gradient")
            solved = judge_temperatures(records.actual, records.golden.values(), tolerance, **about)
            yield from () if solved is None else [Finding(*solved)]

    def _admitted(self, source: QuantitySource, found: Aligned) -> Finding:
        """Return the finding on a tensor without what rounding decides."""
        finding = self.work.judged(source, found)
        rule = self._rules.get(source.quantity)
        return finding if rule is None else rule.admit(source, finding, found)

    @cached_property
    def _rules(self) -> Mapping[str, Admission]:
        return {quantity: rule(self.work) for quantity, rule in ADMISSIONS.items()}

    def _grad_norm(self) -> Iterator[Finding]:
        actual, *norms = (
            norm_of(record) for record in (self.work.records.actual, *self.work.records.golden.values())
        )
        lacking = actual is None or not norms or any(norm is None for norm in norms)
        if lacking or not self.work.unit.only.has("grad_norm", "grad_norm"):
            return
        arrays = [
            next(iter(record.tensors.values()), np.zeros(0)) for record in self.work.records.golden.values()
        ]
        tolerance = self.work.tolerance_of("grad_norm", *arrays[:1])
        verdict = judge_tensor(
            actual,
            norms[0],
            tolerance,
            quantity="grad_norm",
            name=f"grad_norm{self.work.unit.suffix}",
            place=self.work.unit.place,
            locate=lambda _: "grad_norm",
        )
        yield Finding(verdict, tolerance)
