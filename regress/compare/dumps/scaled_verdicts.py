"""Verdicts under the scale of a tensor over all units of a comparison."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from regress.compare.diagnosis.common_patterns import decisive_verdicts
from regress.compare.diagnosis.dataflow import dataflow_key
from regress.compare.dumps.comparison_unit import Unit
from regress.compare.verdicts.tolerance import Tolerance
from regress.compare.verdicts.verdict import Status, Verdict
from regress.dump.coordinates import Place

U = TypeVar("U")

UPDATED = ("gradient", "gradient_clipped", "optimizer", "param")
"""Quantities with a tensor for each parameter."""
FOLLOWING = ("gradient", "gradient_clipped", "grad_norm", "optimizer")
"""Quantities that sum what each token adds to them."""
REACH = 16
"""Most that a token moves a parameter's gradient, relative to its largest value, over its part of the norm of the token
gradients; the largest of 2,760 pairs of token and parameter of three small models was 10.6."""


@dataclass(frozen=True)
class Finding:
    """A verdict and the tolerance behind it, whose scale may turn out to be larger over all units.

    Attributes:
        problem: why there is no verdict: both dumps have the same fault, so that nothing can be compared.
        nonfinite: elements that are NaN or infinite, the same on both sides.
        note: how values were judged, where that is not by the tolerance alone.
        inconclusive: why nothing tells whether a failing verdict is a fault; it is then a problem.
        carried: number of tokens that rounding carried over a bound of the clip range.
        share: part of the norm of all token gradients that they make up.
    """

    verdict: Verdict
    tolerance: Tolerance
    problem: str = ""
    nonfinite: int = 0
    note: str = ""
    inconclusive: str = ""
    carried: int = 0
    share: float = 0.0


class Defect(str):
    """The reason that a tensor cannot be placed in either dump."""

    __slots__ = ()


def notes_and_problems(results: Sequence[tuple[U, Sequence[Finding]]]) -> tuple[list[str], list[str]]:
    """Return notes and problems of findings, a sentence each."""
    alike: dict[tuple[str, str], list[int]] = {}
    problems: dict[str, None] = {}
    judged = dict.fromkeys(finding.note for _, findings in results for finding in findings if finding.note)
    for _, findings in results:
        for finding in findings:
            if finding.problem:
                problems[finding.problem] = None
            elif finding.nonfinite:
                found = alike.setdefault((finding.verdict.quantity, finding.verdict.name), [])
                found.append(finding.nonfinite)
    notes = [
        f"warning: {name if name == quantity else f'{quantity} {name}'} has {sum(counts)} "
        f"element{'s' * (sum(counts) > 1)} that {'are' if sum(counts) > 1 else 'is'} NaN or infinite at the same place "
        "in both dumps, which counts as equal"
        for (quantity, name), counts in alike.items()
    ]
    return [*notes, *judged], [*problems]


Again = Callable[[Sequence[tuple[U, Mapping[tuple[str, str], float]]]], Iterable[Sequence[Finding]]]
"""Function that compares units anew under scales of ``(quantity, name)``; returns findings in the order of units."""


def rejudge_at_common_scale(
    results: Sequence[tuple[U, Sequence[Finding]]], run: Again[U], problems: list[str] | None = None
) -> list[Verdict]:
    """Return verdicts under the scale of a tensor over all units, in the order of the units and their findings.

    The tolerance of a tensor is relative to its largest golden value over all ranks and microbatches. A unit judges by
    the largest that it sees, which is stricter: a pass there is final, a failure is compared anew. Where no tolerance
    was measured, a bias has at least the scale of its weight: its gradient sums the same terms, and may be nothing but
    their rounding, as that of the keys' bias in attention.

    Args:
        problems: receives the doubts about failures, which are then no verdicts.
    """
    scales: dict[tuple[Any, ...], float] = {}
    for _, findings in results:
        for finding in findings:
            scales[_tensor(finding.verdict)] = max(
                scales.get(_tensor(finding.verdict), 0.0), finding.verdict.scale
            )
    for finding in (finding for _, findings in results for finding in findings):
        weight = _weight_of(finding)
        if weight is not None:
            bias = _tensor(finding.verdict)
            scales[bias] = max(scales[bias], scales.get((*bias[:3], weight), 0.0))
    larger = [
        {
            (f.verdict.quantity, f.verdict.name): scales[_tensor(f.verdict)]
            for f in findings
            if f.verdict.status is Status.DRIFT and f.verdict.scale < scales[_tensor(f.verdict)]
        }
        for _, findings in results
    ]
    again = iter(run([(unit, names) for (unit, _), names in zip(results, larger, strict=True) if names]))
    verdicts: list[Verdict] = []
    for (_, findings), names in zip(results, larger, strict=True):
        anew: dict[tuple[str, str], list[Finding]] = {}
        for finding in next(again) if names else ():
            anew.setdefault((finding.verdict.quantity, finding.verdict.name), []).append(finding)
        for finding in findings:
            key = finding.verdict.quantity, finding.verdict.name
            found = anew[key].pop(0) if key in names else finding
            if found.inconclusive and problems is not None:
                problems.append(found.inconclusive)
            else:
                verdicts.append(_rescaled(found, scales[_tensor(finding.verdict)]))
    return verdicts


def examined(
    verdicts: Sequence[Verdict], results: Iterable[tuple[Any, Sequence[Finding]]], run: Again[Any]
) -> list[Verdict]:
    """Return verdicts of which those that decide a diagnosis tell what explains their values.

    These are, by quantity, the failures of the tensor that fails first, in the update in which it does: their units are
    compared once more, with hypotheses, under the tolerances that were found.
    """
    decisive = {_at(verdict): verdict for verdict in _decisive(verdicts)}
    jobs: list[tuple[Unit, Mapping[tuple[str, str], float]]] = []
    for unit, findings in results:
        there = [decisive[at] for f in findings if (at := _at(f.verdict)) in decisive]
        if there and isinstance(unit, Unit) and unit.explained:
            scales = {(verdict.quantity, verdict.name): verdict.scale for verdict in there}
            jobs.append((replace(unit, examined=frozenset(scales)), scales))
    again = (f.verdict for found in (run(jobs) if jobs else ()) for f in found)
    known = {_at(verdict): verdict.affected for verdict in again if verdict.affected is not None}
    return [replace(v, affected=known.get(_at(v), v.affected)) if not v.ok else v for v in verdicts]


def _at(verdict: Verdict) -> tuple[Place, str, str]:
    return verdict.place, verdict.quantity, verdict.name


def _decisive(verdicts: Iterable[Verdict]) -> Iterator[Verdict]:
    failed: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        if not verdict.ok:
            failed.setdefault(verdict.quantity, []).append(verdict)
    for alike in failed.values():
        ordered = sorted(alike, key=dataflow_key)
        update = ordered[0].place.of_update
        yield from decisive_verdicts([v for v in ordered if v.place.of_update == update])


def without_carried(
    verdicts: Sequence[Verdict], results: Sequence[tuple[U, Sequence[Finding]]], problems: list[str]
) -> list[Verdict]:
    """Return verdicts without the failures that tokens at a bound of the clip range may explain, each a problem.

    The gradient of a parameter sums what each token adds to it, and no dump holds the summands: where a token took
    the other branch nothing tells whether a difference of that size is a fault.
    """
    carried: dict[Place, tuple[int, float]] = {}
    for finding in (finding for _, findings in results for finding in findings if finding.carried):
        at = finding.verdict.place.of_update.counted
        count, share = carried.get(at, (0, 0.0))
        carried[at] = count + finding.carried, math.hypot(share, finding.share)
    kept: list[Verdict] = []
    notes_and_problems: dict[Place, list[Verdict]] = {}
    for verdict in verdicts:
        reach = REACH * _share_before(carried, verdict)
        if verdict.status is Status.DRIFT and verdict.quantity in FOLLOWING and verdict.relative <= reach:
            notes_and_problems.setdefault(verdict.place.of_update.counted, []).append(verdict)
        else:
            kept.append(verdict)
    for at, failed in notes_and_problems.items():
        count, share = carried.get(at, (0, 0.0))
        kinds = ", ".join(dict.fromkeys(verdict.quantity for verdict in failed))
        those = f"{count} of its tokens" if count else "tokens of earlier updates"
        norm = f", {share:.2g} of the norm of all," if count else ""
        problems.append(
            f"{failed[0].place.of_update}: {len(failed)} tensors ({kinds}) differ by no more "
            f"than {those}{norm} can make of them that rounding carried over a bound of the clip range, and no dump "
            "holds what a token adds to them: judge them with regress oracle, which repeats the update in the branches "
            "that the trainer took"
        )
    return kept


def _share_before(carried: Mapping[Place, tuple[int, float]], verdict: Verdict) -> float:
    """Return the part of the gradient that carried tokens make up; moments keep those of earlier updates."""
    at, later = verdict.place.of_update.counted, verdict.quantity == "optimizer"
    found = [share for place, (_, share) in carried.items() if place == at or (later and place < at)]
    return (2 if later else 1) * max(found, default=0.0)


def _tensor(verdict: Verdict) -> tuple[Any, ...]:
    return verdict.place.step, verdict.place.update, verdict.quantity, verdict.name


def weight_beside(name: str) -> str | None:
    """Return the name of the weight beside a bias, or of its state; None for any other tensor."""
    module, bias, rest = name.rpartition(".bias")
    return f"{module}.weight{rest}" if bias and rest[:1] in ("", "/", " ") else None


def _weight_of(finding: Finding) -> str | None:
    """Return the name of the weight beside a bias that is judged by the spacing of its dtype alone."""
    table = finding.verdict.quantity in UPDATED and "multiple" in finding.tolerance.basis
    return weight_beside(finding.verdict.name) if table else None


def _rescaled(finding: Finding, scale: float) -> Verdict:
    verdict, tolerance = finding.verdict, finding.tolerance
    if verdict.status is not Status.OK or not verdict.count or scale == verdict.scale or tolerance.bitwise:
        return verdict
    bound = tolerance.relative * scale + tolerance.absolute
    multiple = verdict.max_error / bound if bound else 0.0
    relative = verdict.max_error / scale if scale else 0.0
    return replace(verdict, scale=scale, tolerance=bound, multiple=multiple, relative=relative)
