"""Verdicts under the scale of a tensor over all units of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from regress.compare.verdicts.tolerance import Tolerance
from regress.compare.verdicts.verdict import Status, Verdict

U = TypeVar("U")

UPDATED = ("gradient", "gradient_clipped", "optimizer", "param")
"""Quantities with a tensor for each parameter."""


@dataclass(frozen=True)
class Finding:
    """A verdict and the tolerance behind it, whose scale may turn out to be larger over all units.

    Attributes:
        problem: why there is no verdict: both dumps have the same fault, so that nothing can be compared.
        nonfinite: elements that are NaN or infinite, the same on both sides.
        note: how values were judged, where that is not by the tolerance alone.
        doubt: why nothing tells whether a failing verdict is a fault; it is then a problem.
    """

    verdict: Verdict
    tolerance: Tolerance
    problem: str = ""
    nonfinite: int = 0
    note: str = ""
    doubt: str = ""


class Defect(str):
    """The reason that a tensor cannot be placed in either dump."""

    __slots__ = ()


def told(results: Sequence[tuple[U, Sequence[Finding]]]) -> tuple[list[str], list[str]]:
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


def settle(
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
            if found.doubt and problems is not None:
                problems.append(found.doubt)
            else:
                verdicts.append(_rescaled(found, scales[_tensor(finding.verdict)]))
    return verdicts


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
