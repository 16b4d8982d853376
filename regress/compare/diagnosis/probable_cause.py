"""The probable cause of a first divergence, and what to run next: a table of rules, read from top to bottom.

A rule is a row: the place of a divergence, the patterns proven there and the inputs that hold, with their usual cause.
A divergence that no rule matches has an unknown cause.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

from regress.compare.diagnosis.common_patterns import Pattern
from regress.compare.diagnosis.dataflow import INPUTS
from regress.compare.diagnosis.diagnosis_rule import Rule
from regress.compare.diagnosis.first_divergence import Divergence, listed, name_of
from regress.compare.diagnosis.rule_gate import VALUES, may_speak, proven, tells_side
from regress.compare.diagnosis.rules.rule_table import RULES
from regress.compare.diagnosis.run_context import RunContext
from regress.compare.quantities import OPEN_TYPES, primary_source
from regress.compare.verdicts.verdict import Status

UNKNOWN = "unknown"
_VALUES = (Status.DRIFT, Status.MASK)
"""Statuses that a rule matches if it names none, and no words of the verdict."""
OF_A_RANK = "a rank"
PLACES = ("rank", "micro", "copies")
"""Patterns of places, which are reported as evidence whatever rule speaks."""
_TOKENS = ("all_tokens", "positions_from", "positions_below", "sample", "long_samples", "short_samples")
_PARTS = ("layer", "expert", "shard", "block", "from_module")
AT_MOST = 3
"""Most causes that are named for one divergence."""
EXCHANGED = ", of the golden dump (compared with the actual one as its golden)"
"""Words for a cause that the other direction tells."""
Exchanged: TypeAlias = Callable[[], "tuple[Divergence, RunContext] | None"]
"""Function that returns a divergence as it is with golden and actual exchanged, and the run of the golden dump."""


@dataclass(frozen=True)
class Diagnosis:
    """A probable cause.

    Attributes:
        rule: its id; ``"unknown"`` if no rule applies.
        cause: one sentence.
        evidence: findings of the verdicts that led to it; the first names the diverging tensor.
        next: a command.
        cites: quantity and tensor that the evidence names first.
        of: the dump that it is told of: ``"golden"`` where the values of that one alone are explained by the other's.
    """

    rule: str
    cause: str
    evidence: tuple[str, ...] = ()
    next: str = ""
    cites: Mapping[str, Any] = field(default_factory=dict)
    of: str = "actual"

    def __str__(self) -> str:
        """Return text: ``probably: CAUSE (rule ID; because EVIDENCE)``, and the next command on a line of its own."""
        because = f"; because {'; '.join(self.evidence)}" if self.evidence else ""
        lead = "cause unknown" if self.rule == UNKNOWN else "probably"
        lead += EXCHANGED if self.of == "golden" else ""
        lines = [f"{lead}: {self.cause} (rule {self.rule}{because})"]
        return "\n".join([*lines, *([f"next: {self.next}"] if self.next else [])])

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict, the inverse of `from_json`."""
        return asdict(self) | {"evidence": [*self.evidence]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Diagnosis:
        """Rebuild what `to_json` wrote."""
        return cls(**{**data, "evidence": tuple(data["evidence"])})


def diagnose(
    divergence: Divergence,
    scene: RunContext | None = None,
    rules: Iterable[Rule] | None = None,
    exchanged: Exchanged | None = None,
) -> list[Diagnosis]:
    """Return the causes that the rules know of a divergence, the most specific first; if none matches, unknown.

    Args:
        exchanged: asked where the wrong values of the actual side are not explained: neither of two dumps is known to
            be right, and those of the golden one may be.
    """
    known = scene or RunContext()
    table = [*(RULES if rules is None else rules)]
    likely = _likely(divergence, known, table)
    mine = _proof(likely)
    if exchanged is not None and mine < _VALUES_EXPLAINED and (other := exchanged()) is not None:
        theirs = [row for row in _likely(*other, table) if _proof([row]) > mine and tells_side(row[0])]
        if theirs:
            return [
                replace(_diagnosis_of(rule, other[0], why, other[1]), of="golden") for rule, why in theirs
            ]
    return [_diagnosis_of(rule, divergence, why, known) for rule, why in likely] or [
        _unknown(divergence, known)
    ]


_VALUES_EXPLAINED = 2


def _proof(rows: Sequence[tuple[Rule, list[str]]]) -> int:
    """Return how the first cause is proven: 2 by wrong values that it explains, 1 by their places, 0 by neither."""
    if not rows or not proven(rows[0][0]) or rows[0][0].hint or rows[0][0].otherwise:
        return 0
    rule = rows[0][0]
    values = {id for id in (*rule.patterns, *rule.any_of) if id.partition(":")[0] in VALUES or id in VALUES}
    return _VALUES_EXPLAINED if rule.what or values else 1


def _likely(divergence: Divergence, known: RunContext, rules: Iterable[Rule]) -> list[tuple[Rule, list[str]]]:
    """Return the rules that match, the most specific first, each with its evidence."""
    found = []
    for rule in rules:
        evidence = matched(rule, divergence, known)
        if evidence is not None:
            found.append((-specificity(rule), rule, evidence))
    found = [row for row in found if not row[1].otherwise] or sorted(found, key=lambda row: row[0])[:1]
    if not found:
        return []
    apart = divergence.pattern("copies") is not None  # what is right elsewhere is wrong because of its rank
    best = min(row[0] for row in found)
    likely = [row for row in found if row[0] <= best / 2 or (apart and OF_A_RANK in row[1].claims)]
    ranked = sorted(likely, key=lambda row: (row[1].hint, apart and OF_A_RANK not in row[1].claims, row[0]))[
        :AT_MOST
    ]
    return [(rule, evidence) for _, rule, evidence in ranked]


def specificity(rule: Rule) -> int:
    """Rank a rule by its conditions: proven patterns weigh more than names."""
    proofs = 4 * len(rule.patterns) + 3 * bool(rule.any_of) + 5 * bool(rule.what)
    return (
        proofs
        + 2 * (bool(rule.tensor) + bool(rule.says) + bool(rule.when))
        + bool(rule.at)
        + bool(rule.status)
    )


def matched(rule: Rule, divergence: Divergence, scene: RunContext) -> list[str] | None:
    """Return the evidence, in words, by which a divergence matches a rule; None if any condition fails."""
    first = divergence.first
    if first.status not in (rule.status or _VALUES) and not rule.says:
        return None
    if (rule.at and first.quantity not in rule.at) or (rule.status and first.status not in rule.status):
        return None
    if not re.search(rule.tensor, first.name) or not re.search(rule.says, first.detail):
        return None
    required = [_found(id, divergence) for id in rule.patterns]
    either = [pattern for id in rule.any_of for pattern in _found(id, divergence)]
    if not all(required) or (rule.any_of and not either):
        return None
    if any(_found(id, divergence) for id in rule.without) or not set(rule.holds) <= {*divergence.held}:
        return None
    said = [
        p for p in divergence.patterns if rule.what and any(re.search(rule.what, said) for said in p.said)
    ]
    if (rule.what and not said) or not all(met(divergence, scene) for met in rule.when):
        return None
    if not may_speak(rule, divergence, scene):
        return None
    beside = [p for p in divergence.patterns if p.id in VALUES]
    proofs = dict.fromkeys(
        p.words for p in (*(p for some in required for p in some), *either, *said, *beside)
    )
    words = [first.detail] if rule.says and first.detail else []
    where = [p.words for p in divergence.patterns if p.id in PLACES]
    if not rule.patterns and not rule.any_of:  # which are about one of them
        where += [p.words for p in divergence.patterns if _is_location(p.id)]
    return _evidence(divergence, [*dict.fromkeys((*words, *where, *proofs))])


def _is_location(id: str) -> bool:
    """Return True for patterns of the tokens and parts that are affected."""
    return id in (*_TOKENS, *_PARTS) or id.startswith(("class:", "names:", "mesh:"))


def _found(id: str, divergence: Divergence) -> list[Pattern]:
    if id.endswith("*"):
        return [pattern for pattern in divergence.patterns if pattern.id.startswith(id[:-1])]
    return [pattern for pattern in divergence.patterns if pattern.id == id]


def _evidence(divergence: Divergence, proofs: list[str]) -> list[str]:
    first = divergence.first
    verbs = {Status.DRIFT: "breaks", Status.MASK: "differs", Status.COVERAGE: "is not as planned"}
    about = f"{name_of(first)} {verbs.get(first.status, f'is {first.status}')}"
    evidence = [about, *proofs]
    if divergence.held:
        evidence.append(f"{listed(divergence.held)} hold{'s' if len(divergence.held) == 1 else ''}")
    return evidence


def _diagnosis_of(rule: Rule, divergence: Divergence, evidence: list[str], scene: RunContext) -> Diagnosis:
    there = rule.look in scene.quantities or not scene.quantities
    quantity = rule.look if rule.look and there else divergence.first.quantity
    said = re.search(rule.says, divergence.first.detail)
    of = "golden" if said is not None and said.groupdict().get("golden") else "actual"
    if rule.of_records:
        other = "actual" if of == "golden" else "golden"
        gaps = [gap.replace("the golden dump", f"the {other} dump") for gap in scene.lacks(of)]
        evidence = [*evidence, *(f"the {of} dump lacks {gap}" for gap in gaps)]
    cites = {"quantity": divergence.first.quantity, "tensor": divergence.first.name}
    following = next_command(scene, quantity, rule.variants)
    return Diagnosis(rule.id, _cause(rule, divergence), tuple(evidence), following, cites, of)


def _cause(rule: Rule, divergence: Divergence) -> str:
    """Return the cause that a rule names or, where it names none in particular, the change that was proven."""
    formula = divergence.pattern("formula")
    if formula is None or "changes" not in formula.numbers or proven(rule):
        return rule.cause
    return f"{divergence.first.quantity} is {formula.numbers['what']}"


def _unknown(divergence: Divergence, scene: RunContext) -> Diagnosis:
    quantity = divergence.first.quantity
    made_of = INPUTS.get(quantity, ())
    cause = (
        f"no rule knows this pattern; {quantity} is made of {listed(made_of)}"
        if made_of
        else "no rule knows it"
    )
    beside = [pattern.words for pattern in divergence.patterns if pattern.id in VALUES]
    return Diagnosis(UNKNOWN, cause, tuple(_evidence(divergence, beside)), next_command(scene, quantity, ""))


def next_command(scene: RunContext, quantity: str, variants: str) -> str:
    """Return the command to run next: other variants where they tell more, else a look at the quantity alone."""
    commands = scene.commands
    if (
        quantity in ("coverage", "trajectory") and "records" in commands
    ):  # what is missing has no tensors to look at
        return commands["records"]
    if variants and "replay" in commands:
        return commands["replay"].format(variants=shlex.quote(variants))
    if "compare" in commands:
        return commands["compare"].format(quantity=quantity)
    record_type = quantity if quantity in OPEN_TYPES else primary_source(quantity, quantity).record_type
    return commands.get("show", "regress dump show DUMP/{record_type}").format(
        record_type=_folder(quantity, record_type)
    )


def _folder(quantity: str, record_type: str) -> str:
    """Return the sub-folder of a dump that tells most about a quantity."""
    others = {
        **dict.fromkeys(("coverage", "replicas"), "batch_inputs"),
        **dict.fromkeys(("invariants", "ratio", "token_loss"), "is_loss_debug"),
        "entropy": "forward_data",
        "log_probs": "forward_data",
        "grad_norm": "gradient",
    }
    return others.get(quantity, record_type)
