"""The gate that every rule passes: nothing is claimed of what is not there, or not proven.

A rule is about values that are explained, tokens or tensors that are told apart, records that are missing, or a place
whose inputs all hold. What it speaks of besides must be there: ranks, microbatches, parts of the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from regress.compare.diagnosis.diagnosis_rule import Rule
from regress.compare.diagnosis.first_divergence import Divergence
from regress.compare.diagnosis.run_context import RunContext
from regress.compare.diagnosis.token_attributes import OF_LAYOUTS
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
            "advantages:zeros",
            "offset",
            "factors",
            "scaled",
            "zero",
            "sign",
        ),
        *("parts", "everywhere", "columns", "microbatches:own", "microbatches:last", "microbatches:powers"),
    )
)
"""Patterns that explain the wrong values themselves; whatever rule speaks, they are reported as evidence."""
_OF_ONE_SIDE = VALUES - {
    *("shifted", "permuted", "scaled", "sign", "offset", "factors", "per_sample", "everywhere"),
    *("advantages:scale", "advantages:baseline"),
} | {f"class:{name}" for name in OF_LAYOUTS | {"prompt", "tool"}}
"""Patterns that tell which of two dumps is wrong: the others are as true of the one as of the other."""
_OF_MASKS = re.compile("clip|kept|mask|reject")
"""Metrics that count the tokens which the loss keeps, or holds back."""
_AT_LEAST = 8
_EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
_NOISE = 64
"""Spacings of the coarser dtype that rounding may add up to, relative to the largest value of a tensor."""


def may_speak(rule: Rule, divergence: Divergence, scene: RunContext) -> bool:
    """Return True if all that a rule claims is there, and something proves it."""
    if not all(CLAIMS[name](divergence, scene) for name in rule.claims):
        return False
    if rule.what and not _counts_known(divergence, scene):
        return False
    return rule.open or _by_status(rule, divergence) or proven(rule) or located(divergence)


def _counts_known(divergence: Divergence, scene: RunContext) -> bool:
    """Return False where the numbers of updates differ, and nothing tells on which side one was made.

    A formula takes the golden state for that of one update more than the last: if it is that of two, or of none, the
    other side's is explained by another formula, which is wrong.
    """
    first = divergence.first
    if scene.trusted or not first.name.endswith("/step") or "optimizer" in divergence.before:
        return True
    return first.worst is not None and first.worst.golden == 1.0  # the first update of all


def _by_status(rule: Rule, divergence: Divergence) -> bool:
    """Return True for a record that is missing, additional, of another form or not finite: no values are explained."""
    return bool(rule.says) or divergence.first.status not in (Status.DRIFT, Status.MASK)


def tells_side(rule: Rule) -> bool:
    """Return True if what a rule asks for is seen in the dump that is wrong alone.

    That is a formula of its values, or tokens in rows of its own layout, of a prompt or of a tool.
    """
    asked = (*rule.patterns, *rule.any_of)
    return bool(rule.what) or any(id in _OF_ONE_SIDE or id.partition(":")[0] in _OF_ONE_SIDE for id in asked)


def proven(rule: Rule) -> bool:
    """Return True for a rule that demands patterns: those that were found are proven by themselves."""
    return bool(rule.patterns or rule.any_of or rule.what)


def located(divergence: Divergence) -> bool:
    """Return True if every input of the tensor was judged and holds, so that it is computed wrongly from them."""
    return not divergence.unjudged


def _several_ranks(_: Divergence, scene: RunContext) -> bool:
    return (scene.world_size or 1) > 1


def _of_a_rank(divergence: Divergence, scene: RunContext) -> bool:
    """Return True where whole tensors of a rank are wrong, not one element, and ranks are not stages of a pipeline."""
    record_types = any(pattern.id == "mesh:pp" for pattern in divergence.patterns)
    first = divergence.first
    many = divergence.broken[0] > 1 or first.over >= max(2, min(_AT_LEAST, first.count))
    return _several_ranks(divergence, scene) and not record_types and many


def _rounding(divergence: Divergence, scene: RunContext) -> bool:
    """Return True where errors are as large as rounding to the coarser dtype of the two runs, and of either sign."""
    first = divergence.first
    coarse = max((_EPSILON.get(str(name), 0.0) for name in scene.precisions), default=0.0)
    one_sided = first.count >= _AT_LEAST and abs(first.mean_error) > 0.9 * first.rmse > 0.0
    return first.relative <= _NOISE * coarse and not one_sided


def masks_judged(divergence: Divergence, scene: RunContext) -> bool:
    """Return True unless a metric counts what the loss holds back, and nothing that was judged shows where it does.

    A mask shows in the loss of each token, unless another one hides it: a token that another mask leaves out has a loss
    of 0 whatever the clip range or the trust region says of it.
    """
    if not _OF_MASKS.search(divergence.first.name):
        return True
    objective = scene.config.get("algorithm") or {}
    hides = str(objective.get("sampler_correction")).endswith("mask") or any(
        objective.get(key) is not None for key in ("off_policy_threshold", "rejection")
    )
    return bool(objective) and not hides and "policy_loss" in divergence.agree


def _own_reference(divergence: Divergence, scene: RunContext) -> bool:
    """Return True where the reference differs from the policy: other weights, or after an update of a step before.

    Where no configuration tells, golden values that are right by definition do: what fails, and equals the policy's, is
    not the reference's. Of two dumps either may be the one whose reference is rightly the policy as it begins.
    """
    other = scene.setting("reference", "path") or scene.setting("reference", "without_adapter")
    proven = scene.trusted and not scene.config.get("algorithm")
    return bool(other or proven or divergence.first.place.step)


CLAIMS: Mapping[str, Claim] = {
    "ranks": _several_ranks,
    "a rank": _of_a_rank,
    "microbatches": lambda _, scene: (scene.micros or 1) > 1,
    "all tensors": lambda found, _: (
        found.broken[0] == 1 == found.broken[1] or found.pattern("everywhere") is not None
    ),
    "rounding": _rounding,
    "a reference of its own": _own_reference,
    "masks that were judged": masks_judged,
}
"""Subjects of rules, each with the test that it is there."""
