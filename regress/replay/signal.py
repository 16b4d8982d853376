"""Signal check of a case, and of rollouts: with advantages of zero, equal lengths, nothing clipped or a reference that
is the policy, whole branches of the computation could be wrong and every comparison would still pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regress.dump.arrays import Array
from regress.dump.trajectory import Trajectory
from regress.errors import GoldenError
from regress.golden.case import GoldenCase
from regress.golden.files import parse_where, where_order
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
_ROUNDING = 1e-6  # ratios and log-probs that differ by less may be the same computation in another order


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
    """

    frames: Mapping[str, TokenFrame]
    trajectories: Mapping[int, Sequence[Trajectory]]
    truth: Values
    objective: Mapping[str, Any]
    claims: Sequence[str]
    limit: int = 0

    @cached_property
    def wheres(self) -> list[str]:
        """Updates in order."""
        return sorted(self.frames, key=where_order)

    @property
    def samples(self) -> list[Trajectory]:
        """Trajectories of all steps."""
        return [trajectory for found in self.trajectories.values() for trajectory in found]

    def masks(self, where: str) -> NDArray[np.bool_]:
        """Return `[frame.size]`, True at the tokens of an update that the policy sampled."""
        place = parse_where(where)
        assert place is not None
        by_key = {t.key: t.loss_mask for t in self.trajectories[place.step]}
        return np.concatenate([np.asarray(by_key[key], bool) for key in self.frames[where].samples])

    def tokens(self, quantity: str) -> NDArray[np.float64] | None:
        """Return the values of a quantity at the sampled tokens of all updates, or None where it was not recorded."""
        parts = []
        for where in self.wheres:
            tensors = self.truth.get(where, {}).get(quantity)
            if tensors is None or len(tensors) != 1:
                return None
            (values,) = tensors.values()
            parts.append(np.asarray(values, np.float64).reshape(-1)[self.masks(where)])
        return np.concatenate(parts)

    def wants(self, claim: str, setting: str, off: object) -> bool:
        """Return True if a signal is claimed, or the configuration turns on a setting that needs it."""
        return claim in self.claims or self.objective.get(setting, off) != off


def check_signal(
    *,
    frames: Mapping[str, TokenFrame],
    trajectories: Mapping[int, Sequence[Trajectory]],
    truth: Values,
    config: Mapping[str, Any],
    claims: Sequence[str] = (),
) -> list[str]:
    """Return a sentence for each missing signal; an empty list for a case in which everything can fail.

    `config` is the whole configuration, defaults included; see `Recording` for the others.
    """
    return [problem for problem, _ in _missing(frames, trajectories, truth, config, claims)]


def _missing(
    frames: Mapping[str, TokenFrame],
    trajectories: Mapping[int, Sequence[Trajectory]],
    truth: Values,
    config: Mapping[str, Any],
    claims: Sequence[str] = (),
) -> list[tuple[str, Rule]]:
    """Return a sentence for each missing signal, with the rule that asks for it."""
    limit = int(config.get("data", {}).get("max_completion_length", 0))
    recording = Recording(frames, trajectories, truth, config["algorithm"], claims, limit)
    return [(problem, rule) for rule in _KEYS for problem in rule(recording)]


def require_signal(name: str, **recording: Any) -> None:
    """Raise `SignalError` listing all signals that `check_signal` misses in the named case."""
    missing = _missing(**recording)
    if missing:
        rules = list(dict.fromkeys(rule for _, rule in missing))
        raise SignalError(
            f"case {name!r} cannot become golden, because some faults could not show in it: "
            f"{'; '.join(problem for problem, _ in missing)}: change its recipe or its configuration",
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
        groups = _by_group(samples).values()
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
    steps = [_by_group(samples) for samples in found.trajectories.values()]
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


def _by_group(samples: Sequence[Trajectory]) -> dict[str, list[Trajectory]]:
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


def _clipping(found: Recording) -> Iterator[str]:
    ratio, advantages = found.tokens("ratio"), found.tokens("advantages")
    if ratio is None or advantages is None:
        yield "ratio and advantages are not recorded at every update"
        return
    if found.objective.get("old_log_probs") == "current":  # every ratio is 1, whatever the policy
        return
    used = ratio > 0  # tokens that the loss leaves out, such as those of truncated completions, have none
    ratio, advantages = ratio[used], advantages[used]
    if not (np.abs(ratio - 1) > _ROUNDING).any():
        yield "every importance ratio is 1, so the updates are on-policy"
    low, high = _bounds(found.objective)
    sides = {f"above the clip range ({high:g})": ratio > high}
    if low > 0:
        sides[f"below the clip range ({low:g})"] = ratio < low
    if low < high:
        sides["within the clip range"] = (ratio > low) & (ratio < high)
    signs = {"positive": advantages > 0, "negative": advantages < 0}
    if found.objective.get("advantage") == "constant":
        del signs["negative"]
    for side, there in sides.items() if low < high else ():
        for sign, fits in signs.items():
            if not (there & fits).any():
                yield f"no token with a {sign} advantage has a ratio {side}"
    if low == high:  # nothing asks for the sign of the advantage
        yield from (f"no token has a ratio {side}" for side, there in sides.items() if not there.any())
    for cap in ("delta", "dual_clip"):
        bound = found.objective.get(cap)
        if bound is not None and not ((ratio > bound) & (advantages < 0)).any():
            yield f"no token with a negative advantage has a ratio above {cap} ({bound:g})"


def _bounds(objective: Mapping[str, Any]) -> tuple[float, float]:
    """Return the clip range; an empty one at 1 where the loss clips nothing."""
    if objective["loss"] not in ("ppo_clip", "cispo"):
        return 1.0, 1.0
    low, high = float(objective["clip_low"]), float(objective["clip_high"])
    return (low, high) if objective["clip_bounds"] == "absolute" else (1 - low, 1 + high)


def _correction(found: Recording) -> Iterator[str]:
    if not found.wants("sampler_correction", "sampler_correction", "none"):
        return
    weights = found.tokens("sampler_weights")
    if weights is None:
        yield "sampler weights are not recorded at every update"
        return
    bounds = [found.objective.get(name) for name in ("correction_min", "correction_max")]
    if not (np.abs(weights[weights > 0] - 1) > _ROUNDING).any():
        yield "every sampler weight is 1, so the sampler and the policy agree"
    if str(found.objective.get("sampler_correction")).endswith("mask"):
        if (weights > 0).all():
            yield "no sampler weight is masked"
        return
    for bound in bounds if not found.objective.get("correction_normalize") else ():
        if bound is not None and not (weights == bound).any():
            yield f"no sampler weight is cut to {bound:g}"


def _kl(found: Recording) -> Iterator[str]:
    if not found.wants("kl", "kl_coef", 0.0):
        return
    reference, policy, kl = (found.tokens(name) for name in ("ref_log_probs", "log_probs", "kl"))
    if reference is None or policy is None:
        yield "log-probs of policy and reference are not recorded at every update"
        return
    if not (np.abs(reference - policy) > _ROUNDING).any():
        yield "the reference model agrees with the policy"
    if found.objective.get("kl_placement", "loss") == "loss" and (kl is None or not (kl > 0).any()):
        yield "the KL from the reference is nowhere above 0"


def _entropy(found: Recording) -> Iterator[str]:
    if not found.wants("entropy", "entropy_coef", 0.0):
        return
    entropy = found.tokens("entropy")
    if entropy is None or not (entropy > 0).any():
        yield "no entropy is recorded"


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
    _clipping: "algorithm.clip_low and clip_high",
    _correction: "algorithm.correction_min and correction_max",
    _kl: "recipe.warm_steps",
    _entropy: "leaves_out",
    _gradients: "recipe.model",
}
"""Rules, and the key of ``case.yaml`` that gives the signal each of them misses."""


def require_rollout_signal(case: GoldenCase) -> None:
    """Raise `SignalError` listing what the rollouts of a case lack."""
    missing = [*check_rollouts(case.trajectories(), case.greedy(), _max_turns(case))]
    if missing:
        raise SignalError(
            f"case {case.name!r} cannot become golden, because some faults of the sampler could not show in it: "
            f"{'; '.join(missing)}: change its seed, its recipe or its configuration",
            ["recipe.warm_steps", "data.max_completion_length"],
        )


def check_rollouts(
    drawn: dict[int, list[Trajectory]], greedy: dict[int, list[Trajectory]], turns: int
) -> Iterator[str]:
    """Yield a sentence for each missing signal.

    Args:
        drawn, greedy: completions by step.
        turns: completions that a conversation may have.
    """
    samples = [one for found in drawn.values() for one in found]
    best = [one for found in greedy.values() for one in found]
    for reason in ("stop", "length"):
        if all(one.finish_reason != reason for one in samples):
            yield f"no completion ends with finish_reason {reason!r}"
    if len({len(one.tokens) for one in samples}) < 2:
        yield "all samples are of equal length"
    if len({one.prompt_length for one in samples}) < 2:
        yield "all prompts are of equal length, so nothing is padded"
    if [one.tokens for one in samples] == [one.tokens for one in best]:
        yield "what is drawn is what is most probable"
    if len(drawn) < 2:
        yield "it has one step, so no rollout is sampled from updated weights"
    for found in drawn.values():
        if all(len({tuple(one.tokens) for one in group}) == 1 for group in _by_group(found).values()):
            yield "the runs of each group are the same, so a shared stream would not show"
    if turns > 1 and not any(_inner(one) for one in samples):
        yield "no conversation has masked tokens of the environment between sampled ones"


def _inner(one: Trajectory) -> bool:
    """Return True if masked tokens lie between sampled ones."""
    return len([value for value, _ in groupby(one.loss_mask) if value]) > 1


def _max_turns(case: GoldenCase) -> int:
    task = case.config.get("task")
    turns = task.get("max_turns", 1) if isinstance(task, dict) else 1
    return turns if isinstance(turns, int) else 1
