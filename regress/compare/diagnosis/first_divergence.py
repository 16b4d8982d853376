"""The first divergence: the first record whose inputs hold and whose output breaks, and the failures that follow."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from regress.compare.diagnosis.common_patterns import Pattern, find_patterns, kinds_of
from regress.compare.diagnosis.dataflow import (
    CARRIED,
    INPUTS,
    OPTIONAL,
    dataflow_key,
    depth,
    first_of,
    inputs_of,
    inputs_under,
)
from regress.compare.diagnosis.layer_names import layer_of
from regress.compare.diagnosis.run_context import RunContext
from regress.compare.quantities import UPDATE_TYPES
from regress.compare.verdicts.verdict import Verdict
from regress.dump.coordinates import Place

_LISTED = 10


@dataclass(frozen=True)
class Divergence:
    """The first divergence of a run.

    Attributes:
        first: the verdict on the first tensor that broke.
        held: inputs of the tensor that were judged at its place and hold, in words.
        unjudged: inputs of the tensor that were not judged there.
        broken: failing and judged tensors of the same quantity and update.
        downstream: quantity -> tensors that fail after it and because of it, as far as the dataflow tells.
        independent: quantity -> tensors that fail, too, and do not depend on it.
        patterns: patterns common to all failing tensors of this quantity in this update.
        kinds: kinds of tensors that were judged, in the layer of the first one if it lies in one; see
            `regress.compare.diagnosis.common_patterns.NAMES`.
        agree: quantities of the update that were judged, and all of whose tensors hold.
        before: quantities that were judged in the last update before it, of its step or the one before, and hold.
    """

    first: Verdict
    held: tuple[str, ...] = ()
    unjudged: tuple[str, ...] = ()
    broken: tuple[int, int] = (1, 1)
    downstream: Mapping[str, int] = field(default_factory=dict)
    independent: Mapping[str, int] = field(default_factory=dict)
    patterns: tuple[Pattern, ...] = ()
    kinds: tuple[str, ...] = ()
    agree: tuple[str, ...] = ()
    before: tuple[str, ...] = ()

    @property
    def affected(self) -> str:
        """Patterns of the failures in words; empty if none was found."""
        return "; ".join(pattern.words for pattern in self.patterns)

    def pattern(self, id: str) -> Pattern | None:
        """Return the pattern with an id, or None if it was not found."""
        return next((pattern for pattern in self.patterns if pattern.id == id), None)

    def __str__(self) -> str:
        """Return several lines, the first of which names the tensor."""
        lines = [f"{name_of(self.first)} at {self.first.place}"]
        if self.held:
            lines[0] += f", while {listed(self.held)} hold{'s' if len(self.held) == 1 else ''}"
        if self.unjudged:
            lines.append(f"not recorded or not judged before it: {listed(self.unjudged)}")
        if self.affected:
            lines.append(f"affected: {self.affected}")
        for title, found in (("because of it", self.downstream), ("independently of it", self.independent)):
            if found:
                lines.append(f"broken {title}: {listed(f'{q} ({n})' for q, n in found.items())}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict, the inverse of `from_json`."""
        return {
            "first": self.first.to_json(),
            "held": [*self.held],
            "unjudged": [*self.unjudged],
            "broken": [*self.broken],
            "downstream": dict(self.downstream),
            "independent": dict(self.independent),
            "patterns": [pattern.to_json() for pattern in self.patterns],
            "kinds": [*self.kinds],
            "agree": [*self.agree],
            "before": [*self.before],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Divergence:
        """Rebuild what `to_json` wrote."""
        return cls(
            Verdict.from_json(data["first"]),
            tuple(data["held"]),
            tuple(data["unjudged"]),
            (data["broken"][0], data["broken"][1]),
            dict(data["downstream"]),
            dict(data["independent"]),
            tuple(Pattern(**pattern) for pattern in data["patterns"]),
            tuple(data["kinds"]),
            tuple(data.get("agree", ())),
            tuple(data.get("before", ())),
        )


def find_divergence(verdicts: Sequence[Verdict], scene: RunContext | None = None) -> Divergence | None:
    """Find the first divergence among all verdicts on a run, passed ones included; None if all are ok."""
    failed = [verdict for verdict in verdicts if not verdict.ok]
    if not failed:
        return None
    objective = (scene or RunContext()).config.get("algorithm") or {}
    first = _made_before(first_of(failed), failed, objective)
    there = [v for v in verdicts if _update(v.place) == _update(first.place)]
    alike = [v for v in there if v.quantity == first.quantity]
    wrong = sorted((v for v in alike if not v.ok), key=dataflow_key)
    agreeing, unjudged = _inputs(first, there)
    downstream, independent = _consequences(first, failed, inputs_under(objective))
    return Divergence(
        first,
        agreeing,
        unjudged,
        (len(wrong), len(alike)),
        downstream,
        independent,
        tuple(find_patterns(wrong, alike, scene or RunContext())),
        kinds_of(_of_its_layer(first.name, {verdict.name for verdict in verdicts})),
        _agreeing(there),
        _before(first, verdicts),
    )


def _of_its_layer(name: str, names: set[str]) -> set[str]:
    """Return the names in the layer of a tensor; all names if it lies in none, such as that of a log-prob."""
    layer = layer_of(name)
    return names if layer is None else {other for other in names if layer_of(other) == layer}


def exchanged_divergence(
    found: Divergence, verdicts: Iterable[Verdict], scene: RunContext, before: Iterable[Verdict]
) -> Divergence | None:
    """Return a divergence with golden and actual exchanged: what holds is the same, patterns are those of the other.

    Args:
        verdicts: those on its quantity, made with the two sides exchanged; ``scene`` the run that was the golden one;
            ``before`` all verdicts with the sides as they are.

    Returns:
        None where these verdicts do not fail in the same elements: rounding may decide otherwise for the other side.
    """
    alike, known = (
        [
            v
            for v in all_
            if (v.quantity, _update(v.place)) == (found.first.quantity, _update(found.first.place))
        ]
        for all_ in (verdicts, before)
    )
    wrong = sorted((v for v in alike if not v.ok), key=dataflow_key)
    if not wrong or wrong[0].name != found.first.name:
        return None
    over = sorted(sum(v.over for v in side if v.name == found.first.name) for side in (alike, known))
    if over[0] < _SAME * over[1]:
        return None
    patterns = tuple(p for p in find_patterns(wrong, alike, scene) if not _MUTUAL.match(p.id))
    return replace(found, first=wrong[0], broken=(len(wrong), len(alike)), patterns=patterns)


_SAME = 0.9
"""Least share of affected elements that both directions have in common."""
_MUTUAL = re.compile("scaled|sign$|offset$|factors$|advantages:(scale|baseline)$")
"""Relations of two sides, which do not tell on which of them something is wrong."""


_FORWARD = ("activations", "log_probs")
"""Quantities that a wrong model makes wrong before any log-probs that were computed before the updates."""


def _made_before(first: Verdict, failed: Sequence[Verdict], objective: Mapping[str, Any]) -> Verdict:
    """Return the failure that an apparently first one follows from under an objective; itself if it follows from none.

    Microbatches whose loss mask is another hold other tokens, so that they tell nothing of a mask's own inputs.
    """
    needed = inputs_under(objective).get(first.quantity, ())
    of_masks = first.quantity == "batch_inputs"
    if not needed or (of_masks and not _MASK.search(first.name)):
        return first
    step, update = _update(first.place)
    updates = (None, 0) if first.quantity in _OF_A_STEP else (update,)
    own = [v for v in failed if v.place.step == step and v.place.update in updates]
    masked = {v.place for v in own if of_masks and v.quantity == first.quantity}
    own = [v for v in own if v.quantity in (*needed, *_FORWARD) and v.place not in masked]
    return first_of(own) if any(v.quantity in needed for v in own) else first


_OF_A_STEP = ("sampler_log_probs", "mismatch")
_MASK = re.compile("response_mask|effective_valid")


def _agreeing(there: Iterable[Verdict]) -> tuple[str, ...]:
    """Return the quantities without a failing tensor."""
    ok: dict[str, bool] = {}
    for verdict in there:
        ok[verdict.quantity] = ok.get(verdict.quantity, True) and verdict.ok
    return tuple(quantity for quantity, agrees in ok.items() if agrees)


def name_of(verdict: Verdict) -> str:
    """Return quantity and tensor, or one of them if they have the same name."""
    return verdict.quantity if verdict.name == verdict.quantity else f"{verdict.quantity} {verdict.name}"


def listed(items: Iterable[str]) -> str:
    """Join the first ten items and say how many more there are."""
    known = [*items]
    more = f" and {len(known) - _LISTED} more" if len(known) > _LISTED else ""
    return ", ".join(known[:_LISTED]) + more


def _update(place: Place) -> tuple[int | None, int | None]:
    return place.step, place.update


def _before(first: Verdict, verdicts: Iterable[Verdict]) -> tuple[str, ...]:
    """Return what the last judged update before a verdict has; nothing where it is of an earlier step than the last."""
    made = [v for v in verdicts if v.quantity in UPDATE_TYPES and _number(v.place) < _number(first.place)]
    last = max((_number(v.place) for v in made), default=(-1, -1))
    if last[0] < _number(first.place)[0] - 1:
        return ()
    return tuple(dict.fromkeys(v.quantity for v in made if _number(v.place) == last))


def _number(place: Place) -> tuple[int, int]:
    """Return a key that sorts updates; what belongs to no step or update comes before those that do."""
    return (-1 if place.step is None else place.step, -1 if place.update is None else place.update)


def _inputs(first: Verdict, there: Sequence[Verdict]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the inputs of the tensor that hold, and those that were not judged."""
    place = first.place
    near = [v for v in there if v.place.micro in (None, place.micro) or place.micro is None]
    judged = {v.quantity for v in near}
    broken = {v.quantity for v in near if not v.ok}
    agreeing = [q for q in INPUTS.get(first.quantity, ()) if q in judged - broken]
    unjudged = [q for q in INPUTS.get(first.quantity, ()) if q not in judged and q not in OPTIONAL]
    if first.quantity in ("activations", "gradient"):
        agreeing += _neighbours(first, near)
    return tuple(agreeing), tuple(unjudged)


def _neighbours(first: Verdict, near: Sequence[Verdict]) -> list[str]:
    """Return the preceding module (of gradients: the parameter behind it), if its tensors hold at this microbatch."""
    alike = [v for v in near if v.quantity == first.quantity and v.place.micro == first.place.micro]
    here, forward = depth(first.name), first.quantity == "activations"
    names = {v.name for v in alike if (depth(v.name) < here if forward else depth(v.name) > here)}
    good = sorted(names - {v.name for v in alike if not v.ok})  # of one depth, the first in the alphabet
    if not good:
        return []
    nearest = max(good, key=depth) if forward else min(good, key=depth)
    return [f"{first.quantity} {nearest}"]


def _consequences(
    first: Verdict, failed: Sequence[Verdict], more: Mapping[str, tuple[str, ...]]
) -> tuple[dict[str, int], dict[str, int]]:
    """Count, by quantity, the other failures that follow from the first, and those that do not."""
    downstream: dict[str, int] = {}
    independent: dict[str, int] = {}
    broken: dict[tuple[int | None, int | None], set[str]] = {}
    carried = False
    known = sorted(failed, key=dataflow_key)
    early = (first.quantity, *more) if first.quantity in {q for own in more.values() for q in own} else ()
    for update in dict.fromkeys(_update(v.place) for v in known):
        own = [v for v in known if _update(v.place) == update]
        here = broken.setdefault(update, set())
        for verdict in own:
            if verdict is first:
                here.add(verdict.quantity)
                continue
            because = carried or verdict.quantity == first.quantity or _made_of(verdict.quantity, here)
            because = because or (verdict.quantity in early and verdict.place.step == first.place.step)
            found = downstream if because else independent
            found[verdict.quantity] = found.get(verdict.quantity, 0) + 1
            if because:
                here.add(verdict.quantity)
        carried = carried or any(v.quantity in CARRIED for v in own)
    return downstream, independent


def _made_of(quantity: str, broken: set[str]) -> bool:
    if quantity in ("invariants", "replicas"):  # statements about any of the others
        return bool(broken)
    # values computed from the wrong samples or tokens are wrong in all that follows
    return quantity in broken or not broken.isdisjoint(inputs_of(quantity))
