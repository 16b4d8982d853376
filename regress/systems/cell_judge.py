"""The judge of a cell: its dump against the truth, and against what was declared to differ."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from regress.compare.comparison_request import compare_sources
from regress.compare.diagnosis.first_divergence import Divergence, find_divergence, name_of
from regress.compare.diagnosis.probable_cause import UNKNOWN, diagnose
from regress.compare.dumps.comparison import Comparison
from regress.compare.verdicts.verdict import Status, Verdict
from regress.report.comparison_report import run_context_of
from regress.report.verdict_text import headline
from regress.systems.conformance_row import Error, Result
from regress.systems.protocol import Declared

CLOSE = 0.1
"""Relative distance up to which a declared amount is met."""
FACTOR = 1e-3
"""Relative distance up to which a declared factor is met; what it leaves over is a hundredth at most."""


@dataclass(frozen=True)
class Judgement:
    """Verdict on a cell, with the fields of a `Row` that follow from it."""

    result: Result
    errors: Mapping[str, Error]
    told: str = ""
    first: str = ""
    cause: str = ""
    listed: tuple[str, ...] = ()


def judge(
    truth: Path, dump: Path, declared: Sequence[Declared] = (), precision: str = "float32"
) -> Judgement:
    """Judge the dump of a cell by its truth.

    Forward quantities are judged for each rank and microbatch, gradients and parameters for each rank and update. What
    cannot be compared makes an error of a cell in which nothing fails; what fails beside it is wrong all the same.

    Raises:
        RegressError: if the dumps cannot be compared at all.
    """
    stated = None if precision == "float32" else precision
    found = _shared(compare_sources(str(truth), str(dump), precision=stated))
    errors = errors_of(found.verdicts)
    listed = (*found.notes, *(f"{one} is in the system's dump only" for one in found.actual_only))
    open_ = tuple(f"not compared: {one}" for one in found.problems)
    if open_ and (declared or not found.failed):
        return Judgement(Result.ERROR, errors, "; ".join(open_), listed=listed)
    listed += open_
    if not found.failed:
        gone = [one for one in declared if not _met(one, found.verdicts)]
        statement = "; ".join(
            f"{one.quantity} was declared to differ ({one.reason}) and does not" for one in gone
        )
        return Judgement(Result.UNDECLARED if gone else Result.EXACT, errors, statement, listed=listed)
    scene = replace(run_context_of(found), precisions=(None, None))  # the truth is float64 on purpose
    divergence = find_divergence(found.verdicts, scene)
    statement = (
        headline(divergence.first, str(divergence.first.place)) if divergence else headline(found.failed[0])
    )
    first = name_of(divergence.first if divergence else found.failed[0])
    causes = () if divergence is None else diagnose(divergence, scene)
    cause = "; ".join(f"{one.cause} ({one.rule})" for one in causes if one.rule != UNKNOWN)
    unmet = [one for one in declared if not _met(one, found.verdicts)]
    if declared and not unmet and not open_ and _covered(divergence, declared):
        reasons = "; ".join(f"{one.quantity}: {one.reason}" for one in declared)
        return Judgement(Result.DECLARED, errors, reasons, first, listed=listed)
    if unmet:
        statement += f" (declared was {'; '.join(_stated(one) for one in unmet)})"
    return Judgement(Result.WRONG, errors, statement, first, cause, listed)


def _shared(comparison: Comparison) -> Comparison:
    """Return a comparison without verdicts on tensors that only the system's dump has; they become notes."""
    extra = [v for v in comparison.verdicts if v.status is Status.EXTRA and v.name != "samples"]
    names = dict.fromkeys(f"{v.quantity} is in the system's dump only" for v in extra)
    kept = [v for v in comparison.verdicts if v not in extra]
    return replace(comparison, verdicts=kept, notes=[*comparison.notes, *names])


def errors_of(verdicts: Iterable[Verdict]) -> dict[str, Error]:
    """Return the largest error of each quantity, in the order of computation."""
    by_quantity: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        by_quantity.setdefault(verdict.quantity, []).append(verdict)
    found = {}
    for quantity, own in by_quantity.items():
        measured = [v for v in own if v.worst is not None or v.count]
        relative = max((v.relative_l2 for v in measured), default=None)
        multiple = max((v.multiple for v in own), default=0.0)
        found[quantity] = Error(
            relative if relative is not None and math.isfinite(relative) else None,
            multiple if math.isfinite(multiple) else None,
            len(own),
            sum(not v.ok for v in own),
        )
    return found


def _met(declared: Declared, verdicts: Sequence[Verdict]) -> bool:
    """Return True if a declared difference is there, of its declared size."""
    failed = [v for v in verdicts if v.quantity == declared.quantity and not v.ok]
    if not failed:
        return False
    if declared.factor is not None:
        return all(
            v.alpha is not None
            and abs(v.alpha / declared.factor - 1) <= FACTOR
            and v.residual is not None
            and v.residual <= FACTOR * 10
            for v in failed
        )
    assert declared.amount is not None
    largest = max(v.relative_l2 for v in failed)
    return abs(largest - declared.amount) <= CLOSE * declared.amount


def _covered(divergence: Divergence | None, declared: Sequence[Declared]) -> bool:
    """Return True if nothing fails but what was declared, and what follows from it."""
    names = {one.quantity for one in declared}
    return divergence is not None and {divergence.first.quantity, *divergence.independent} <= names


def _stated(one: Declared) -> str:
    size = f"a factor of {one.factor:g}" if one.factor is not None else f"a relative error of {one.amount:g}"
    return f"{one.quantity} with {size}"
