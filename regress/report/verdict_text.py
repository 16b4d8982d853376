"""Verdicts in words: the first line of a failing test, and its details."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from regress.compare.diagnosis.first_divergence import Divergence, name_of
from regress.compare.diagnosis.probable_cause import Diagnosis
from regress.compare.replica_agreement import QUANTITY as REPLICAS
from regress.compare.updates.invariant_counts import QUANTITY as INVARIANTS
from regress.compare.verdicts.verdict import Status, Verdict, Worst
from regress.printable_text import printable
from regress.report.number_format import multiple, pair, plural, short

WIDTH = 159
"""Maximum length of a first line: summaries and CI logs cut off what exceeds 160 characters."""

_BY_VALUE = (Status.OK, Status.DRIFT, Status.MASK)
"""Statuses of verdicts that a tolerance decides."""

LISTED = 10
"""Number of tensors and quantities named one by one; the others are counted."""


def headline(verdict: Verdict, where: str = "") -> str:
    """Return one line: the verdict, the tensor, the worst element or other finding, and the place.

        drift: log_probs: sample g/0, position 17, token 5 'a': golden -1.5, actual -1.25, 3 x tolerance (dense/...)

    Args:
        where: name of the comparison, such as ``case/variant``; it stands in brackets together with the place
            within it, if there is room, else the place alone. Without it no place is named.
    """
    line = printable(f"{verdict.status}: {name_of(verdict)}: {_finding(verdict)}")
    place = printable(f" ({placed(where, verdict)})") if where else ""
    for where_text in (place, f" ({verdict.place})" if where else ""):
        if len(line) + len(where_text) <= WIDTH:
            return line + where_text
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..."


def explain(
    verdicts: Sequence[Verdict],
    *,
    where: str | None = None,
    divergence: Divergence | None = None,
    diagnoses: Sequence[Diagnosis] = (),
    environment: Sequence[str] = (),
    commands: Mapping[str, str] | None = None,
) -> str:
    """Return the details of a failure, several lines.

    Args:
        verdicts: verdicts that failed the test, the most telling first.
        where: the first was found; by default its place.
        divergence: first divergence of the same run; ``diagnoses`` are the probable causes.
        environment: differences from the environment of the recording, one sentence each.
        commands: next commands, by purpose: ``{"reproduce": "pytest ..."}``.

    Raises:
        ValueError: if there is no verdict.
    """
    if not verdicts:
        raise ValueError("there is no verdict to explain")
    lines = [
        *details(verdicts[0], where),
        *describe_divergence(divergence, diagnoses, *verdicts),
        *_siblings(verdicts[1:]),
    ]
    lines += [f"environment: {line}" for line in environment]
    lines += [f"{purpose}: {command}" for purpose, command in (commands or {}).items()]
    return printable("\n".join(lines))


def placed(where: str, verdict: Verdict) -> str:
    """Return the place of a comparison, and the place within it, if it has one."""
    return "/".join(part for part in (where, str(verdict.place)) if part)


def details(verdict: Verdict, where: str | None = None) -> Iterator[str]:
    """Yield one verdict, line by line: worst element, error, number of elements, tolerance and its reason."""
    yield f"{verdict.status}: {name_of(verdict)} at {where or verdict.place}"
    if verdict.detail and verdict.status is not Status.MASK:  # whose detail is how many elements differ
        yield f"  {verdict.detail}"
    if verdict.worst is not None:
        yield from _element(verdict.worst)
        yield from _figures(verdict)
    if verdict.reason and verdict.status in _BY_VALUE:
        yield f"  tolerance  {verdict.reason}{_basis(verdict.basis)}"


def _element(worst: Worst) -> Iterator[str]:
    golden, actual = pair(worst.golden, worst.actual)
    index = str([*worst.index])
    local = f", at {index} of the local tensor" if worst.index and index not in worst.where else ""
    yield f"  worst      {worst.where}{local}"
    yield f"  golden     {golden}"
    yield f"  actual     {actual}"


def _figures(verdict: Verdict) -> Iterator[str]:
    worst = verdict.worst
    assert worst is not None
    if verdict.status not in _BY_VALUE:  # an error of NaN, or a share of an infinity, is meaningless
        if verdict.over:
            yield f"  elements   {verdict.over} of {verdict.count}"
        return
    ulp = "" if worst.ulp is None else f", {short(worst.ulp)} ulp"
    bound = (
        f"{multiple(verdict.multiple)} of {short(verdict.tolerance)}"
        if verdict.tolerance
        else "nothing is tolerated"
    )
    yield f"  error      {short(worst.error)}{ulp}: {bound}"
    if verdict.status is not Status.MASK:  # a token id twice as large is not twice as wrong
        yield (
            f"  relative   {short(verdict.relative)} of the scale {short(verdict.scale)}, "
            f"{short(verdict.relative_l2)} in the Euclidean norm"
        )
    yield f"  elements   {verdict.over} of {verdict.count} {'beyond the tolerance' if verdict.tolerance else 'differ'}"


def _basis(basis: Mapping[str, object]) -> str:
    known = [f"{key} {short(v) if isinstance(v, float) else v}" for key, v in basis.items()]
    return f" ({', '.join(known)})" if known else ""


def _finding(verdict: Verdict) -> str:
    worst = verdict.worst
    if worst is None or verdict.status is Status.COVERAGE or verdict.quantity in (REPLICAS, INVARIANTS):
        return verdict.detail
    if verdict.status is Status.NONFINITE:
        return (
            verdict.detail if worst.where == verdict.name else f"{verdict.detail}, at {_element_of(verdict)}"
        )
    golden, actual = pair(worst.golden, worst.actual)
    much = multiple(verdict.multiple) if verdict.tolerance else f"{verdict.over} of {verdict.count} elements"
    element = "" if worst.where == verdict.name else f"{_element_of(verdict)}: "  # the one value of a scalar
    return f"{element}golden {golden}, actual {actual}, {much}"


def _element_of(verdict: Verdict) -> str:
    """Return the worst element without the name of its tensor, which the line already has."""
    assert verdict.worst is not None
    return verdict.worst.where.removesuffix(f" of {verdict.name}")


def _siblings(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yield further tensors of the same test."""
    if verdicts:
        yield f"{plural(len(verdicts), 'more tensor')} of this test failed:"
    for verdict in verdicts[:LISTED]:
        yield f"  {headline(verdict)}"
    if len(verdicts) > LISTED:
        yield f"  and {len(verdicts) - LISTED} more"


def describe_divergence(
    divergence: Divergence | None, diagnoses: Sequence[Diagnosis], *verdicts: Verdict
) -> Iterator[str]:
    """Yield the first divergence, the affected quantities, the probable causes and the next commands, line by line.

    Args:
        verdicts: verdicts of the test that is explained.
    """
    if divergence is not None:
        first, *rest = str(divergence).splitlines()
        if divergence.first in verdicts:
            yield f"first divergence: this one{first.partition(str(divergence.first.place))[2]}"
        else:
            yield f"first divergence: {first}: {headline(divergence.first)}"
        yield from rest
    for diagnosis in diagnoses:
        yield from str(diagnosis).splitlines()
