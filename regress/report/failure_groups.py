"""Failing replays that broke alike, as one entry: the first divergence, its cause, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from regress.compare.diagnosis.first_divergence import Divergence
from regress.compare.diagnosis.probable_cause import UNKNOWN, Diagnosis
from regress.compare.verdicts.verdict import Verdict
from regress.report.number_format import plural
from regress.report.verdict_text import headline

GROUPS = 5
"""Groups that are reported; the others are counted."""
_NAMED = 3


@dataclass
class Group:
    """Replays whose first divergence is the same tensor with the same cause.

    Attributes:
        first: verdict on that tensor in the first of them; None if they could not be replayed at all.
        cause: the likeliest cause, or why they could not be replayed.
        replays: their names, ``case/variant``.
        following: what failed in them at the first divergence, or because of it.
        others: what failed in them independently of it.
        apart: quantities of the others.
    """

    first: Verdict | None
    cause: str
    replays: list[str] = field(default_factory=list)
    following: int = 0
    others: int = 0
    apart: set[str] = field(default_factory=set)

    @property
    def title(self) -> str:
        """One line: the first divergence of the first replay, or that it could not be replayed."""
        return (
            f"{self.replays[0]} cannot be replayed"
            if self.first is None
            else headline(self.first, self.replays[0])
        )

    def lines(self, what: str, command: str) -> Iterator[str]:
        """Yield the lines of a group.

        Args:
            what: what is counted, such as ``test``.
            command: what shows more.
        """
        yield self.title
        yield f"  {self.extent(what)}"
        yield f"  {self.cause}"
        yield f"  more: {command}"

    def extent(self, what: str) -> str:
        """Return how much failed in which replays; ``what`` is counted, such as ``test``."""
        names = ", ".join(self.replays[:_NAMED])
        further = len(self.replays) - _NAMED
        where = f"{names} and {further} more" if further > 0 else names
        count = plural(self.following, f"failed {what}")
        follow = "" if self.first is None else " at it and after it"
        others = f"; {self.others} independent of it" if self.others else ""
        return f"{count}{follow} in {where}{others}"


def grouped(
    failed: Mapping[str, Sequence[str]],
    divergences: Mapping[str, Divergence],
    diagnoses: Mapping[str, Sequence[Diagnosis]],
    errors: Mapping[str, str],
) -> list[Group]:
    """Group failing replays, those with most failures first.

    Args:
        failed: replay -> quantity of each test, or check, that failed in it.
        divergences, diagnoses: first divergences and probable causes, by replay.
        errors: replay -> why it could not be judged.
    """
    found: dict[tuple[str, ...], Group] = {}
    apart: list[str]
    for where, quantities in failed.items():
        divergence = divergences.get(where)
        if where in errors:
            group = found.setdefault((errors[where],), Group(None, errors[where]))
            apart = []
        elif divergence is None:
            continue
        else:
            first, cause = divergence.first, next(iter(diagnoses.get(where, ())), None)
            key = (first.quantity, first.name, str(first.status), "" if cause is None else cause.rule)
            group = found.setdefault(key, Group(first, _said(cause)))
            apart = [quantity for quantity in quantities if quantity in divergence.independent]
        group.replays.append(where)
        group.following += len(quantities) - len(apart)
        group.others += len(apart)
        group.apart.update(apart)
    return sorted(found.values(), key=lambda group: -group.following)


def _said(cause: Diagnosis | None) -> str:
    """Return a cause in one line, without its evidence."""
    if cause is None or cause.rule == UNKNOWN:
        return "cause unknown"
    return f"probably: {cause.cause} (rule {cause.rule})"
