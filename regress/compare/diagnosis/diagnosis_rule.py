"""Rules of the diagnosis: place of a divergence, patterns found there, inputs that hold, and the usual cause."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeAlias

from regress.compare.diagnosis.first_divergence import Divergence
from regress.compare.diagnosis.run_context import RunContext
from regress.compare.verdicts.verdict import Status

Condition: TypeAlias = Callable[[Divergence, RunContext], bool]
"""Predicate of a divergence and its run."""


@dataclass(frozen=True)
class Rule:
    """A row of the table; a field left at its default is not a condition.

    Attributes:
        id: names the rule in reports.
        cause: usual cause, with names of configuration keys as in this project.
        at: quantities that the first divergence may be in.
        tensor: expression that the name of the tensor must contain.
        status: statuses of the first verdict.
        says: expression that the detail of the first verdict must contain.
        patterns: ids of patterns that must all have been found; one that ends in ``*`` stands for all that begin so.
        any_of: ids of patterns, at least one of which must have been found.
        what: expression that the words of a found pattern must contain, or the id of a change that explains the values.
        without: patterns that must not have been found.
        holds: quantities that must have been judged before it and hold.
        when: further conditions, all of which must be met.
        variants: variants to replay next, as ``--variants`` takes them: those that tell this cause from others.
        look: the quantity whose tensors tell most, if both sides have it; by default that of the divergence.
        of_records: True if records that the actual dump lacks are its evidence.
        claims: what it speaks of, which must be there: names in `regress.compare.diagnosis.rule_gate.CLAIMS`.
        open: True if it says what to record, and so needs no inputs that hold.
        hint: True if it names one cause of several that are possible: it is reported after all that are proven.
        otherwise: True if it says where alone, and so is reported only where no other rule knows more.
    """

    id: str
    cause: str
    at: Collection[str] = ()
    tensor: str = ""
    status: Collection[Status] = ()
    says: str = ""
    patterns: Collection[str] = ()
    any_of: Collection[str] = ()
    what: str = ""
    without: Collection[str] = ()
    holds: Collection[str] = ()
    when: Collection[Condition] = ()
    variants: str = ""
    look: str = ""
    of_records: bool = False
    claims: Collection[str] = ()
    open: bool = False
    hint: bool = False
    otherwise: bool = False
