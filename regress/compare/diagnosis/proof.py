"""The gate that every rule passes: nothing is claimed of what is not there, or not proven.

A rule is about values that are explained, tokens or tensors that are told apart, records that are missing, or a place
whose inputs all hold. What it speaks of besides must be there: ranks, microbatches, parts of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from regress.compare.diagnosis.divergence import Divergence
from regress.compare.diagnosis.rule import Rule
from regress.compare.diagnosis.run_context import RunContext
from regress.compare.verdicts.verdict import Status

Claim = Callable[[Divergence, RunContext], bool]

VALUES = frozenset(
    (
        *("formula", "equals", "fitted", "fitted_each", "terms", "microbatches", "samples", "per_sample"),
        *(
            "constant",
            "tempered",
            "rounded",
            "shifted",
            "permuted",
            "targets",
            "advantages:scale",
            "advantages:baseline",
            "advantages:within",
            "offset",
            "factors",
            "scaled",
            "zero",
            "sign",
        ),
        *("parts", "everywhere", "columns", "microbatches:own", "microbatches:last", "microbatches:powers"),
    )
)
"""Patterns that explain the wrong values themselves; whatever rule speaks, they are told as evidence."""
_AT_LEAST = 8
_EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
_NOISE = 64
"""Spacings of the coarser dtype that rounding may add up to, relative to the largest value of a tensor."""


def may_speak(rule: Rule, divergence: Divergence, scene: RunContext) -> bool:
    """Return True if all that a rule claims is there, and something proves it."""
    if not all(CLAIMS[name](divergence, scene) for name in rule.claims):
        return False
    return rule.open or _by_status(rule, divergence) or _by_patterns(rule) or located(divergence)


def _by_status(rule: Rule, divergence: Divergence) -> bool:
    """Return True for a record that is missing, additional, of another form or not finite: no values are explained."""
    return bool(rule.says) or divergence.first.status not in (Status.DRIFT, Status.MASK)


def _by_patterns(rule: Rule) -> bool:
    """Return True if patterns that the rule demands were found; they are proven by themselves."""
    return bool(rule.patterns or rule.any_of or rule.what)


def located(divergence: Divergence) -> bool:
    """Return True if every input of the tensor was judged and holds, so that it is computed wrongly from them."""
    return not divergence.unjudged


def _several_ranks(_: Divergence, scene: RunContext) -> bool:
    return (scene.world_size or 1) > 1


def _of_a_rank(divergence: Divergence, scene: RunContext) -> bool:
    """Return True where whole tensors of a rank are wrong, not one element, and ranks are no stages of a pipeline."""
    stages = any(pattern.id == "mesh:pp" for pattern in divergence.patterns)
    first = divergence.first
    many = divergence.broken[0] > 1 or first.over >= max(2, min(_AT_LEAST, first.count))
    return _several_ranks(divergence, scene) and not stages and many


def _rounding(divergence: Divergence, scene: RunContext) -> bool:
    """Return True where errors are as large as rounding to the coarser dtype of the two runs, and of either sign."""
    first = divergence.first
    coarse = max((_EPSILON.get(str(name), 0.0) for name in scene.precisions), default=0.0)
    one_sided = first.count >= _AT_LEAST and abs(first.mean_error) > 0.9 * first.rmse > 0.0
    return first.relative <= _NOISE * coarse and not one_sided


CLAIMS: Mapping[str, Claim] = {
    "ranks": _several_ranks,
    "a rank": _of_a_rank,
    "microbatches": lambda _, scene: (scene.micros or 1) > 1,
    "all tensors": lambda found, _: (
        found.broken[0] == 1 == found.broken[1] or found.pattern("everywhere") is not None
    ),
    "rounding": _rounding,
}
"""Subjects of rules, each with the test that it is there."""
