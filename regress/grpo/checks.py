"""Rules an `Objective` must keep, field by field and between fields. Imports no torch."""

from collections.abc import Iterator
from dataclasses import fields
from difflib import get_close_matches

from regress.errors import ConfigError
from regress.grpo.objective import Objective


def check_objective(objective: Objective) -> None:
    """Raise `ConfigError` at the first field whose value is not allowed, alone or beside the others."""
    for spec in fields(objective):
        value = getattr(objective, spec.name)
        if value is not None and "choices" in spec.metadata:
            check_choice(spec.name, value, spec.metadata["choices"])
        if value is not None and "minimum" in spec.metadata:
            _check_minimum(spec.name, value, spec.metadata["minimum"])
    for culprit, rule in (*_loss_conflicts(objective), *_rollout_conflicts(objective)):
        raise ConfigError(f"{culprit} is not possible: {rule}.")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise `ConfigError` unless ``value`` is one of ``choices``; the message names the nearest."""
    if value in choices:
        return
    near = get_close_matches(str(value), choices, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise ConfigError(f"{name}={value!r} is unknown: choose one of {', '.join(choices)}{hint}")


def _check_minimum(name: str, value: object, minimum: float) -> None:
    if not (isinstance(value, int | float) and value >= minimum):
        raise ConfigError(f"{name}={value!r} is too small: it must be a number of at least {minimum:g}.")


def _loss_conflicts(o: Objective) -> Iterator[tuple[str, str]]:
    """Yield impossible values and combinations within the loss, as (culprit, rule and remedy)."""
    if o.ddof > 1:
        yield f"ddof={o.ddof}", "set it to 0 (population) or 1 (sample)"
    if o.gamma > 1.0:
        yield f"gamma={o.gamma:g}", "a discount is at most 1"
    low, high = o.clip_range
    if low > high or (o.loss == "ppo_clip" and not low <= 1.0 <= high):
        culprit = f"clip_low={o.clip_low:g} with clip_high={o.clip_high:g} and clip_bounds={o.clip_bounds}"
        yield culprit, f"the ratio would be clipped to [{low:g}, {high:g}]; choose bounds that enclose 1"
    if o.loss != "ppo_clip" and o.delta is not None:
        yield f"delta with loss={o.loss}", "it belongs to loss=ppo_clip; set delta to null"
    if o.loss != "ppo_clip" and o.dual_clip is not None:
        yield f"dual_clip with loss={o.loss}", "it belongs to loss=ppo_clip; set dual_clip to null"
    if o.dual_clip is not None and o.dual_clip <= 1.0:
        yield f"dual_clip={o.dual_clip:g}", "it must be greater than 1; 3 is usual"
    if o.log_ratio_min is not None and o.log_ratio_max is not None and o.log_ratio_min > o.log_ratio_max:
        yield f"log_ratio_min={o.log_ratio_min:g}", "it must not exceed log_ratio_max"
    if o.kl_bias_correction and o.kl_in_reward:
        rule = "it corrects the KL of the loss; use kl_placement=loss or set it to false"
        yield "kl_bias_correction with kl_placement=reward", rule
    if o.advantage == "constant" and o.kl_in_reward:
        rule = "a constant advantage knows no reward; use kl_placement=loss or set kl_coef to 0"
        yield "advantage=constant with kl_placement=reward", rule
    if o.norm_length is not None and o.aggregation != "seq-mean-token-sum-norm":
        rule = "it belongs to aggregation=seq-mean-token-sum-norm; set norm_length to null"
        yield f"norm_length with aggregation={o.aggregation}", rule


def _rollout_conflicts(o: Objective) -> Iterator[tuple[str, str]]:
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
    if o.sampler_correction != "none" and o.old_log_probs == "sampler":
        culprit = f"sampler_correction={o.sampler_correction} with old_log_probs=sampler"
        yield culprit, "the ratio already runs against the sampler; use old_log_probs=recompute"
    if o.old_log_probs == "current" and o.kl_in_reward:
        rule = "the reward needs log-probs from before the update; use kl_placement=loss or old_log_probs=recompute"
        yield "old_log_probs=current with kl_placement=reward", rule
