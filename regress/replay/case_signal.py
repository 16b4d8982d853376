"""Signal check of a case: with advantages of zero, equal lengths, nothing clipped or a reference that is the policy,
whole branches of the computation could be wrong and every comparison would still pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
import torch

from regress.compare.diagnosis.counterfactuals import Formula, branches, depends_on, gives
from regress.compare.diagnosis.token_formulas import FORMULAS, TokenFormulas
from regress.dump.numpy_arrays import Array
from regress.dump.trajectory import Trajectory
from regress.errors import GoldenError
from regress.golden.golden_files import where_order
from regress.grpo.fields import ObjectiveFields
from regress.grpo.objective_catalogue import ADVANTAGES
from regress.grpo.policy_losses import LOSSES
from regress.layout import TokenFrame

CLAIMS = (
    *("tool_tokens", "kl", "sampler_correction", "entropy"),
    *("below_limit", "repeated_prompt", "lone_sample", "inexact_mean"),
)
"""Signals that a case can claim beyond those that every case has. ``below_limit``: no completion is as long as
``data.max_completion_length`` allows."""


class SignalError(GoldenError):
    """Some faults could not show in a case.

    Attributes:
        keys: keys of ``case.yaml`` that give the missing signals, the most likely first.
        luck: True if another seed could have them all.
    """

    def __init__(self, text: str, keys: Sequence[str] = (), *, luck: bool = True) -> None:
        super().__init__(text)
        self.keys, self.luck = list(keys), luck


Values = Mapping[str, Mapping[str, Mapping[str, Array]]]
"""Update -> quantity -> tensor name -> values."""

_LEAST_UPDATES = 3
_CLAIMED = {"kl": "kl_coef", "entropy": "entropy_coef", "sampler_correction": "sampler_correction"}
_FIELDS = {spec.name: spec for spec in fields(ObjectiveFields)}
_OFF = (None, False, 0, "none")
_RANGE = ("clip_low", "clip_high", "clip_bounds")
_UNASKED = (
    *("sequence_gradient", "missing_rewards", "kl_controller", "entropy_controller"),
    "correction_log_clamp",
)
"""Settings that need not show in the value of a token: a sample's gradient is the same by both ways where its tokens
weigh alike, rewards may all be there, a controller sets the coefficient of the next step, a tighter bound hides one.
"""


@dataclass(frozen=True)
class Recording:
    """Recording to check.

    Attributes:
        frames: update -> the samples of that update.
        trajectories: step -> its sampled completions.
        truth: update -> quantity -> tensor name -> canonical values; token quantities are flat `[frame.size]`.
        objective: the section `algorithm` of the whole configuration, defaults included.
        claims: claims of the case.
        limit: greatest length of a completion.
        formulas: update -> the formulas of its token quantities.
    """

    frames: Mapping[str, TokenFrame]
    trajectories: Mapping[int, Sequence[Trajectory]]
    truth: Values
    objective: Mapping[str, Any]
    claims: Sequence[str]
    limit: int = 0
    formulas: Mapping[str, TokenFormulas] = field(default_factory=dict)

    @cached_property
    def wheres(self) -> list[str]:
        """Updates in order."""
        return sorted(self.frames, key=where_order)

    @property
    def samples(self) -> list[Trajectory]:
        """Trajectories of all steps."""
        return [trajectory for found in self.trajectories.values() for trajectory in found]


def check_signal(
    *,
    frames: Mapping[str, TokenFrame],
    trajectories: Mapping[int, Sequence[Trajectory]],
    truth: Values,
    config: Mapping[str, Any],
    claims: Sequence[str] = (),
    formulas: Mapping[str, TokenFormulas],
) -> list[str]:
    """Return a sentence for each missing signal; an empty list for a case in which everything can fail.

    `config` is the whole configuration, defaults included; see `Recording` for the others.
    """
    return [problem for problem, _ in _missing(frames, trajectories, truth, config, formulas, claims)]


def _missing(
    frames: Mapping[str, TokenFrame],
    trajectories: Mapping[int, Sequence[Trajectory]],
    truth: Values,
    config: Mapping[str, Any],
    formulas: Mapping[str, TokenFormulas],
    claims: Sequence[str] = (),
) -> list[tuple[str, Rule]]:
    """Return a sentence for each missing signal, with the rule that asks for it."""
    limit = int(config.get("data", {}).get("max_completion_length", 0))
    recording = Recording(frames, trajectories, truth, config["algorithm"], claims, limit, formulas)
    return [(problem, rule) for rule in _KEYS for problem in rule(recording)]


def require_signal(name: str, **recording: Any) -> None:
    """Raise `SignalError` listing all signals that `check_signal` misses in the named case."""
    missing = _missing(**recording)
    if missing:
        rules = list(dict.fromkeys(rule for _, rule in missing))
        raise SignalError(
            f"""case {name!r} cannot become golden, because some faults could not show in it:
            {"; ".join(problem for problem, _ in missing)}: change its recipe or its configuration""",
            [_KEYS[rule] for rule in rules],
            luck=not {*rules} & {_claims, _updates},
        )


def _claims(found: Recording) -> Iterator[str]:
    for claim in found.claims:
        if claim not in CLAIMS:
            yield f"the claim {claim!r} cannot be checked (claims are {', '.join(CLAIMS)})"


def _updates(found: Recording) -> Iterator[str]:
    if len(found.wheres) < _LEAST_UPDATES:
        yield f"it has {len(found.wheres)} optimizer updates, and needs at least {_LEAST_UPDATES}"


def _lengths(found: Recording) -> Iterator[str]:
    for where in found.wheres:
        if len(set(found.frames[where].lengths)) < 2:
            yield f"all samples of {where} are of equal length"


def _endings(found: Recording) -> Iterator[str]:
    if 1 not in {size for t in found.samples for size in _turns(t.loss_mask)}:
        yield "no completion has just one token"
    if not any(t.finish_reason == "length" for t in found.samples):
        yield "no completion is truncated (finish_reason 'length')"


def _turns(mask: Sequence[int]) -> list[int]:
    """Return the number of tokens in each run of sampled ones: a conversation has several completions."""
    return [len(list(run)) for value, run in groupby(mask) if value]


def _groups(found: Recording) -> Iterator[str]:
    for samples in found.trajectories.values():
        groups = by_group(samples).values()
        different = [len({sample.reward for sample in group}) for group in groups]
        flat = any(number == 1 < len(group) for number, group in zip(different, groups, strict=True))
        if max(different) > 1 and flat:
            return
    yield "no step has a group of equal rewards beside one of different rewards"


def _tool_tokens(found: Recording) -> Iterator[str]:
    if "tool_tokens" in found.claims and not any("101" in _runs(t.loss_mask) for t in found.samples):
        yield "no completion has masked tool tokens between sampled ones"


def _rollouts(found: Recording) -> Iterator[str]:
    """Check what rollouts of other people look like."""
    steps = [by_group(samples) for samples in found.trajectories.values()]
    prompts = [[_prompt(group[0]) for group in groups.values()] for groups in steps]
    sizes = [[len(group) for group in groups.values()] for groups in steps]
    signals = {
        "repeated_prompt": (
            any(len({*step}) < len(step) for step in prompts),
            "no prompt is there twice in a step",
        ),
        "lone_sample": (
            any(min(step) == 1 < max(step) for step in sizes),
            "no group has one sample beside groups of several",
        ),
        "below_limit": (
            all(len(t.tokens) - t.prompt_length < found.limit for t in found.samples),
            f"a completion has the maximal length ({found.limit})",
        ),
        "inexact_mean": (
            any(_inexact([t.reward for t in group]) for groups in steps for group in groups.values()),
            "no group has equal rewards whose mean is another number",
        ),
    }
    for claim, (there, problem) in signals.items():
        if claim in found.claims and not there:
            yield problem


def by_group(samples: Sequence[Trajectory]) -> dict[str, list[Trajectory]]:
    """Return the samples of each group, by its id."""
    groups: dict[str, list[Trajectory]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    return groups


def _prompt(sample: Trajectory) -> tuple[int, ...]:
    return tuple(sample.tokens[: sample.prompt_length])


def _inexact(rewards: Sequence[float]) -> bool:
    """Return True for equal rewards, not 0, whose sum over their number is rounded to something else."""
    return len({*rewards}) == 1 and sum(rewards) / len(rewards) != rewards[0]


def _runs(mask: Sequence[int]) -> str:
    """Return `0101` for 0001101: each run of equal values as one."""
    return "".join(str(value) for value, _ in groupby(mask))


def _settings(found: Recording) -> Iterator[str]:
    """Ask of each setting whether some value would be another one, had it been another one."""
    asked: dict[str, set[tuple[Any, ...]]] = {}
    unknown: set[str] = set()
    shown: set[tuple[str, tuple[Any, ...]]] = set()
    for formulas in found.formulas.values():
        for quantity in FORMULAS:
            golden, formula = formulas.golden(quantity), formulas.formula(quantity)
            if golden is None or formula is None:
                continue
            read = formula.reads(quantity) & formula.choices.keys()
            if not gives(formula, quantity, golden):
                unknown |= read  # what was recorded was made otherwise: nothing tells what it depends on
                continue
            others = {key: {*_others(formula, key)} for key in read}
            asked |= others
            shown |= _shown(formula, quantity, others)
            if ADVANTAGES[formula.settings.advantage].never_negative:
                other = replace(
                    formula, inputs={**formula.inputs, "advantages": -formula.inputs["advantages"]}
                )
                unknown |= {key for key, _ in _shown(other, quantity, others) - shown}
    claimed = {_CLAIMED[claim] for claim in found.claims if claim in _CLAIMED}
    counts = {key for key in asked.keys() - unknown if _counts(key, found.objective)}
    for key in sorted(claimed | counts):
        if not all((key, others) in shown for others in asked.get(key, {()})):
            yield f"no value depends on algorithm.{key} ({found.objective.get(key)})"


def _others(formula: Formula, key: str) -> Iterator[tuple[Any, ...]]:
    """Yield other values of a setting, of each of which one must show.

    A bound must show when it is tighter and when there is none; a number or a choice must show by any other value.
    """
    spec, known = _FIELDS[key], getattr(formula.settings, key)
    if spec.metadata.get("infinite"):
        yield from ((0.0,), (math.inf,))
    elif spec.default is None and not isinstance(known, str):
        without = [none for none in (None, math.inf) if _possible(formula.changed(**{key: none}))]
        yield (*without[:1],) if without else formula.choices[key]
    else:
        yield formula.choices[key]


def _possible(formula: Formula) -> bool:
    found = [values for quantity in FORMULAS if (values := formula.values(quantity)) is not None]
    return bool(found) and all(bool(torch.isfinite(values).all()) for values in found)


def _shown(
    formula: Formula, quantity: str, asked: Mapping[str, set[tuple[Any, ...]]]
) -> set[tuple[str, tuple[Any, ...]]]:
    """Return the settings and other values of them by which a quantity is another one."""
    pairs = [(key, values) for key, found in asked.items() for values in found]
    return {(key, values) for key, values in pairs if depends_on(formula, quantity, key, values)}


def _counts(key: str, objective: Mapping[str, Any]) -> bool:
    """Return True for a setting that a case is there for: one of its loss, or one that is not the default."""
    known, loss = objective.get(key), LOSSES[objective["loss"]]
    if key in _UNASKED or known in _OFF:
        return False
    if objective.get("old_log_probs") == "current" and key in _RANGE:
        return False  # every ratio is 1, whatever the policy
    if key == "delta" and (objective.get("dual_clip") or math.inf) < known:
        return False  # the loss is cut before
    if key == "scale" and not ADVANTAGES[objective["advantage"]].home:
        return False  # it is checked, and not used
    if key == "rejection" and objective.get("correction_policy") != "current":
        return False  # those tokens are not loss tokens
    own = key in loss.reads or (key in _RANGE and loss.clips)
    return own or key == "loss" or bool(known != _FIELDS[key].default)


def _branches(found: Recording) -> Iterator[str]:
    """Ask of each choice between two policy losses, such as the clipped one and the other, whether it matters."""
    shown: dict[str, bool] = {}
    for formulas in found.formulas.values():
        golden, formula = formulas.golden("policy_loss"), formulas.formula("policy_loss")
        if golden is not None and formula is not None and gives(formula, "policy_loss", golden):
            for words, shows in branches(formula, "policy_loss"):
                shown[words] = shown.get(words, False) or shows
    if found.objective.get("old_log_probs") != "current":  # else every ratio is 1, whatever the policy
        yield from (
            f"no policy loss would be another one {words}" for words, shows in shown.items() if not shows
        )


def _policy_loss(found: Recording) -> Iterator[str]:
    for where in found.wheres:
        values = found.truth.get(where, {}).get("policy_loss", {}).values()
        if values and not any(np.any(each != 0) for each in values):
            yield f"every policy loss at {where} is zero"


def _gradients(found: Recording) -> Iterator[str]:
    names: set[str] = set()
    moved: set[str] = set()
    for where in found.wheres:
        tensors = found.truth.get(where, {}).get("gradient", {})
        nonzero = {name for name, values in tensors.items() if np.any(values != 0)}
        if not tensors:
            yield f"no gradients are recorded at {where}"
        elif not nonzero:
            yield f"every gradient at {where} is zero, so its loss could be anything"
        names |= tensors.keys()
        moved |= nonzero
    for name in sorted(names - moved):
        yield f"the gradient of {name} is zero at every update"


Rule = Callable[[Recording], Iterator[str]]
_KEYS: Mapping[Rule, str] = {
    _claims: "claims",
    _updates: "recipe.steps",
    _lengths: "task.params",
    _endings: "recipe.warm_steps",
    _groups: "data.group_size",
    _tool_tokens: "task.max_turns",
    _rollouts: "recipe.rollouts",
    _settings: "the settings of algorithm that are named",
    _branches: "algorithm.clip_low and clip_high",
    _policy_loss: "algorithm.clip_low and clip_high",
    _gradients: "recipe.model",
}
"""Rules, and the key of ``case.yaml`` that gives the signal each of them misses."""
