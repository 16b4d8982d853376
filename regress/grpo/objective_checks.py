"""Rules an `Objective` must keep, field by field and between fields. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import Field, fields
from difflib import get_close_matches
from typing import Any

from regress.errors import ConfigError
from regress.grpo.fields import ObjectiveFields
from regress.grpo.objective_catalogue import ADVANTAGES, CATALOGUE
from regress.grpo.policy_losses import LOSSES, bounds_in_words
from regress.grpo.rejection_criteria import criteria

_KINDS: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float), "bool": (bool,)}
_NAMED = {"str": "a text", "int": "a whole number", "float": "a number", "bool": "true or false"}
Conflicts = Iterator[tuple[str, str]]


def check_objective(objective: ObjectiveFields) -> None:
    """Raise `ConfigError` for the first field whose value is not allowed, with a note for each of the others.

    Fields beside one another are looked at where each has a value that it may have alone.
    """
    mistakes = [*_field_mistakes(objective)] or [
        f"{culprit} is not possible: {mistake}." for rule in _RULES for culprit, mistake in rule(objective)
    ]
    if mistakes:
        error = ConfigError(mistakes[0])
        for other in mistakes[1:]:
            error.add_note(other)
        raise error


def _field_mistakes(objective: ObjectiveFields) -> Iterator[str]:
    for spec in fields(objective):
        if any(spec.name in vars(base) for base in ObjectiveFields.__mro__):
            try:
                _check_value(spec, getattr(objective, spec.name))
            except ConfigError as error:
                yield str(error)


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise `ConfigError` unless ``value`` is one of ``choices``; the message names the nearest."""
    known = tuple(choices)
    if value in known:
        return
    near = get_close_matches(str(value), known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise ConfigError(f"{name}={value!r} is unknown: choose one of {', '.join(known)}{hint}")


def _check_value(spec: Field[Any], value: object) -> None:
    """Raise `ConfigError` unless a value has the type of its field and keeps the rules in its metadata."""
    kind, _, optional = str(spec.type).partition(" | ")
    if value is None and optional:
        return
    if "choices" in spec.metadata:
        check_choice(spec.name, value, spec.metadata["choices"])
    if "minimum" in spec.metadata:
        _check_minimum(spec.name, value, spec.metadata["minimum"])
    if not isinstance(value, _KINDS[kind]) or (isinstance(value, bool) and kind != "bool"):
        raise ConfigError(f"{spec.name}={value!r} has the wrong type: it must be {_NAMED[kind]}.")
    if isinstance(value, float) and not (math.isfinite(value) or "infinite" in spec.metadata):
        raise ConfigError(f"{spec.name}={value!r} is not finite: give a finite number.")


def _check_minimum(name: str, value: object, minimum: float) -> None:
    if not (isinstance(value, int | float) and value >= minimum):
        raise ConfigError(f"{name}={value!r} is too small: it must be a number of at least {minimum:g}.")


def _loss_conflicts(o: ObjectiveFields) -> Conflicts:
    """Yield impossible values and combinations within the policy loss, as (culprit, rule and remedy)."""
    low, high = o.clip_range
    if low > high:
        yield (
            bounds_in_words(o),
            f"the ratio would be clipped to [{low:g}, {high:g}]; choose bounds that enclose 1",
        )
    yield from LOSSES[o.loss].conflicts(o)
    if o.dual_clip is not None and o.dual_clip <= 1.0:
        yield f"dual_clip={o.dual_clip:g}", "it must be greater than 1; 3 is usual"
    if o.log_ratio_min is not None and o.log_ratio_max is not None and o.log_ratio_min > o.log_ratio_max:
        yield f"log_ratio_min={o.log_ratio_min:g}", "it must not exceed log_ratio_max"
    for name in ("sapo_tau_pos", "sapo_tau_neg"):
        if getattr(o, name) <= 0.0:
            yield f"{name}={getattr(o, name):g}", "a temperature is greater than 0"
    if not 0.0 < o.cov_fraction <= 1.0:
        yield f"cov_fraction={o.cov_fraction:g}", "a share is greater than 0 and at most 1"
    if o.cov_low > o.cov_high:
        yield f"cov_low={o.cov_low:g}", "it must not exceed cov_high"
    if o.top_entropy_quantile > 1.0:
        yield (
            f"top_entropy_quantile={o.top_entropy_quantile:g}",
            "a share is at most 1, which keeps all tokens",
        )


def _advantage_conflicts(o: ObjectiveFields) -> Conflicts:
    """Yield impossible values and combinations from rewards to advantages."""
    if o.ddof > 1:
        yield f"ddof={o.ddof}", "set it to 0 (population) or 1 (sample)"
    for name, word in (("gamma", "discount"), ("lam", "lambda")):
        if getattr(o, name) > 1.0:
            yield f"{name}={getattr(o, name):g}", f"a {word} is at most 1"
    if o.gpg_norm <= 0.0:
        yield f"gpg_norm={o.gpg_norm:g}", "it divides advantages; give a number greater than 0"
    advantage = ADVANTAGES[o.advantage]
    if o.normalize_advantages and not advantage.one_a_sample:
        rule = "it is for one advantage a sample; set it to false"
        yield f"normalize_advantages with advantage={o.advantage}", rule
    if o.reward_min is not None and o.reward_max is not None and o.reward_min > o.reward_max:
        yield f"reward_min={o.reward_min:g}", "it must not exceed reward_max"
    if o.reward_aggregation == "normalize_then_sum" and o.advantage != "grpo":
        rule = "it replaces the rule of grpo; use advantage=grpo or reward_aggregation=sum_then_normalize"
        yield f"reward_aggregation=normalize_then_sum with advantage={o.advantage}", rule
    if o.missing_rewards == "exclude" and (advantage.whitened or advantage.by_token):
        rule = "it compares tokens, of which none can be left out; use missing_rewards=refuse"
        yield f"missing_rewards=exclude with advantage={o.advantage}", rule
    if not advantage.knows_reward and o.kl_in_reward:
        rule = f"a {o.advantage} advantage knows no reward; use kl_placement=loss or set kl_coef to 0"
        yield f"advantage={o.advantage} with kl_placement=reward", rule
    separate = "reward_aggregation=normalize_then_sum" if o.reward_aggregation == "normalize_then_sum" else ""
    separate = f"advantage={o.advantage}" if advantage.separate else separate
    if separate and o.kl_in_reward:
        yield (
            f"kl_placement=reward with {separate}",
            "there is no one reward to subtract it from; use kl_placement=loss",
        )
    if separate and (o.reward_min, o.reward_max) != (None, None):
        name = "reward_max" if o.reward_min is None else "reward_min"
        yield f"{name} with {separate}", f"it bounds the sum of rewards; set {name} to null"


def _term_conflicts(o: ObjectiveFields) -> Conflicts:
    """Yield impossible combinations of the terms beside the policy loss, and of their controllers."""
    if o.kl_bias_correction and o.kl_in_reward:
        rule = "it corrects the KL of the loss; use kl_placement=loss or set it to false"
        yield "kl_bias_correction with kl_placement=reward", rule
    if o.kl_controller == "adaptive":
        if o.kl_coef == 0.0:
            yield (
                "kl_controller=adaptive with kl_coef=0",
                "it multiplies the coefficient; give kl_coef a value",
            )
        if o.kl_target == 0.0:
            yield "kl_target=0", "the adaptive controller divides by it; give a number greater than 0"
        if o.old_log_probs == "current":
            rule = "the KL is measured before the update; use old_log_probs=recompute"
            yield "kl_controller=adaptive with old_log_probs=current", rule
    if o.entropy_scope == "microbatch" and o.entropy_aggregation == "loss":
        rule = "the bonus is aggregated like the loss; use entropy_aggregation=token-mean or entropy_scope=global"
        yield "entropy_scope=microbatch with entropy_aggregation=loss", rule
    marked = o.top_entropy_quantile < 1.0 and o.has_entropy_term and o.entropy_aggregation == "token-mean"
    if marked and o.entropy_scope != o.statistics_scope:
        rule = "the bonus is a mean over the tokens that the quantile keeps; set both scopes to the same"
        yield f"entropy_scope={o.entropy_scope} with statistics_scope={o.statistics_scope}", rule
    other = (
        o.off_policy_threshold is not None or LOSSES[o.loss].leaves_out or o.correction_policy == "current"
    )
    if o.entropy_controller == "adaptive" and o.top_entropy_quantile < 1.0 and other:
        rule = "the tokens of the bonus are then not those that masks keep; set top_entropy_quantile=1"
        yield "entropy_controller=adaptive with top_entropy_quantile and another mask", rule
    if o.entropy_coef_min > o.entropy_coef_max:
        yield f"entropy_coef_min={o.entropy_coef_min:g}", "it must not exceed entropy_coef_max"


def _unread(o: ObjectiveFields) -> Conflicts:
    """Yield fields with a value of their own that none of the chosen parts reads."""
    defaults = {spec.name: spec.default for spec in fields(ObjectiveFields)}
    for kind, parts in CATALOGUE.items():
        chosen = parts.get(str(getattr(o, kind)))
        for name in dict.fromkeys(name for part in parts.values() for name in part.reads):
            if getattr(o, name) == defaults[name] or (chosen is not None and name in chosen.reads):
                continue
            homes = [other for other, part in parts.items() if name in part.reads]
            off = "null" if defaults[name] is None else f"{defaults[name]}"
            rule = f"it belongs to {kind}={' or '.join(homes)}; set {name} to {off}"
            yield f"{name} with {kind}={getattr(o, kind)}", rule
    if o.norm_rule != "maximum" and o.norm_length is not None:
        yield f"norm_rule={o.norm_rule} with norm_length={o.norm_length}", "set one of them"


def _rollout_conflicts(o: ObjectiveFields) -> Conflicts:
    """Yield impossible combinations of the corrections for the rollout engine, as (culprit, rule and remedy)."""
    bounds = (o.correction_min, o.correction_max)
    if o.sampler_correction == "none" and bounds != (None, None):
        name = "correction_min" if o.correction_max is None else "correction_max"
        yield f"{name} with sampler_correction=none", f"choose a correction or set {name} to null"
    if o.sampler_correction != "none" and bounds == (None, None):
        yield (
            f"sampler_correction={o.sampler_correction} without bounds",
            "set correction_max or correction_min",
        )
    if o.correction_min is not None and o.correction_max is not None and o.correction_min > o.correction_max:
        yield f"correction_min={o.correction_min:g}", "it must not exceed correction_max"
    if o.sampler_correction != "none" and o.correction_policy == "current" and LOSSES[o.loss].on_ratio:
        rule = "the ratio of the loss is a weight of the current policy already; use loss=reinforce"
        yield (
            f"correction_policy=current with sampler_correction={o.sampler_correction} and loss={o.loss}",
            rule,
        )
    if o.sampler_correction != "none" and o.correction_policy == "old" and o.old_log_probs == "sampler":
        culprit = f"sampler_correction={o.sampler_correction} with old_log_probs=sampler"
        yield culprit, "the ratio already runs against the sampler; use old_log_probs=recompute"
    if o.correction_normalize and o.sampler_correction == "none":
        yield "correction_normalize with sampler_correction=none", "choose a correction or set it to false"
    if o.old_log_probs == "current" and o.kl_in_reward:
        rule = "the reward needs log-probs from before the update; use kl_placement=loss or old_log_probs=recompute"
        yield "old_log_probs=current with kl_placement=reward", rule


def _rejection_conflicts(o: ObjectiveFields) -> Conflicts:
    """Yield impossible combinations of rejection."""
    if o.rejection is None:
        if o.correction_policy == "current" and o.sampler_correction == "none":
            rule = "there are neither weights nor rejection; use correction_policy=old"
            yield "correction_policy=current", rule
        return
    criteria(o.rejection)
    if o.correction_policy == "old" and o.old_log_probs != "recompute":
        rule = "there is no policy from before the update to compare; use correction_policy=current"
        yield f"rejection with old_log_probs={o.old_log_probs}", rule


_RULES = (
    *(_loss_conflicts, _advantage_conflicts, _term_conflicts),
    *(_unread, _rollout_conflicts, _rejection_conflicts),
)
