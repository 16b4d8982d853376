"""Comparison of one record of the actual dump with the golden records of the same tokens or tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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
from regress.compare.dumps.unit_work import Admission, UnitWork, opened
from regress.compare.quantities import EVERYWHERE, UPDATE_TYPES, QuantitySource
from regress.compare.verdicts.tensor_judge import judge_tensor
from regress.compare.verdicts.tolerance import Tolerance
from regress.compare.verdicts.verdict import Status, Verdict
from regress.dump.coordinates import Place
from regress.dump.record import Record
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


LEAST = 1e-3
"""Relative difference below which a solved temperature is taken for the same one."""
MUCH = 10.0
"""Relative error of a temperature over the part of the gradients that nothing explains: rounding, or other terms."""


def judge_temperatures(
    actual: Record, golden: Iterable[Record], tolerance: Tolerance, *, place: Place, suffix: str
) -> tuple[Verdict, Tolerance] | None:
    """Return the verdict on the divisor of the logits, farthest from any golden one; None where a side tells none.

    The loss may depend on log-probs alike and these on other logits: ``d loss / d log-prob`` then holds.
    """
    records = list(golden)
    own, known = (
        _recorded_temperatures(actual),
        [value for record in records for value in _recorded_temperatures(record)],
    )
    if not own or not known:
        return None
    pairs = [(value, min(known, key=lambda one: abs(one - value))) for value in own]
    value, nearest = max(pairs, key=lambda pair: abs(pair[0] - pair[1]))
    unexplained = max(_unexplained(record) for record in (actual, *records))
    bound = replace(tolerance, relative=max(LEAST, tolerance.relative, MUCH * unexplained), bitwise=False)
    verdict = judge_tensor(
        np.asarray(value),
        np.asarray(nearest),
        bound,
        quantity="token_gradient",
        name=f"temperature{suffix}",
        place=place,
        locate=lambda _: "divisor of the logits",
    )
    return verdict, bound


def _unexplained(record: Record) -> float:
    """Return the median part of a token's gradient that log-prob and entropy leave unexplained."""
    rest = record.tensors.get("token_residual")
    if rest is None:
        return 0.0
    values = rest.astype(np.float64)
    some = values[np.isfinite(values) & (values > 0)]
    return float(np.median(some)) if some.size else 0.0


def _recorded_temperatures(record: Record) -> list[float]:
    temperatures: Any = record.meta.get("temperatures")
    return (
        [float(one) for one in temperatures if isinstance(one, int | float)]
        if isinstance(temperatures, list)
        else []
    )
