"""Rules for settings of loss and optimizer: what the client was configured with, and what the service applied."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from regress.interop.modes.discrepancy import CLIENT, SERVICE, TRAINER, Discrepancy
from regress.interop.modes.step_context import StepContext

ENTROPY = "entropy_coeff"
_NOT_OF_THE_LOSS = ("enable_debug_dump",)
_ADAM = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
_CLOSE = 1e-6
"""Relative distance of two settings that differ in rounding to float32 alone."""


def settings(context: StepContext) -> Iterator[Discrepancy]:
    """Yield settings that did not take effect as they were configured."""
    yield from _entropy(context)
    yield from _loss(context)
    yield from _optimizer(context)
    yield from _clipping(context)
    yield from _temperature(context)


def _entropy(context: StepContext) -> Iterator[Discrepancy]:
    asked = context.client.setting("loss_fn_config").get(ENTROPY) if context.client is not None else None
    whose = f"{CLIENT} is configured with"
    if asked is None:
        asked, whose = context.setting("algorithm", "entropy_coef"), f"{TRAINER} has"
    applied = [float(one.config.get(ENTROPY) or 0.0) for one in context.passes]  # type: ignore[arg-type]  # the service computed with it
    evidence = [f"{ENTROPY} of {applied[0]:g} in the service's index"] if applied else []
    known = [_coefficient(context.losses.get(name, {})) for name in (TRAINER, SERVICE)]
    if not applied and None not in known:
        applied = [known[1] or 0.0]
        evidence = [f"loss and pg_loss of the service differ by {applied[0]:g} times its entropy_loss"]
        asked, whose = known[0], f"{TRAINER} has, by its losses,"
    if not isinstance(asked, int | float) or not applied or all(_same(asked, value) for value in applied):
        return
    lost = bool(asked) and not any(applied)
    if not lost and whose.startswith(TRAINER) and context.passes:
        return  # a client may have multiplied it by the weights
    cause = (
        "the entropy coefficient was not passed: the configuration of the loss is not sent, or the service ignores it"
        if lost
        else "the entropy coefficient of the service is another one than configured"
    )
    yield Discrepancy(
        "entropy-coefficient-lost" if lost else "entropy-coefficient",
        cause,
        (f"{whose} {asked:g}, the service applied {applied[0]:g}", *evidence),
        ("loss", "token_loss", "entropy_loss", "gradient"),
    )


def _coefficient(losses: Mapping[str, float]) -> float | None:
    """Return the coefficient of the entropy that the sums of a loss and its terms tell."""
    loss, policy, entropy = (losses.get(name) for name in ("loss", "pg_loss", "entropy_loss"))
    if loss is None or policy is None or not entropy:
        return None
    found = (policy - loss) / entropy
    rounding = 1e-6 * max(abs(loss), abs(policy)) / abs(entropy)
    return 0.0 if abs(found) <= rounding else found


def _loss(context: StepContext) -> Iterator[Discrepancy]:
    if context.client is None or not context.passes:
        return
    name, asked = context.client.asked.get("loss_fn"), context.client.setting("loss_fn_config")
    same = (
        {name, "cross_entropy"} if name == "surrogate" and context.custom else {name}
    )  # Tinker's custom loss
    others = {one.loss for one in context.passes} - same
    if isinstance(name, str) and others:
        yield Discrepancy(
            "other-loss",
            "the service computed another loss than the client asked for",
            (f"{CLIENT} asked for {name}, the service computed {', '.join(sorted(map(str, others)))}",),
            ("token_loss", "loss", "gradient"),
        )
    for one in context.passes[:1]:
        names = ({*asked} | {*one.config}) - {ENTROPY, *_NOT_OF_THE_LOSS}
        wrong = [key for key in sorted(names) if key in asked and not _same(asked[key], one.config.get(key))]
        if wrong:
            yield Discrepancy(
                "loss-settings",
                "settings of the loss did not take effect as configured: not sent, or ignored by the service",
                tuple(
                    f"{key}: {_of(asked, key)} configured, {_of(one.config, key)} applied" for key in wrong
                ),
                ("token_loss", "policy_loss", "loss", "gradient"),
            )


def _of(values: Mapping[str, Any], key: str) -> str:
    return f"{values[key]!r}" if key in values else "none"


def _optimizer(context: StepContext) -> Iterator[Discrepancy]:
    known = [pair for pair in (_of_trainer(context), _of_client(context), _applied(context)) if pair[0]]
    for (asked, whose), (applied, where) in pairwise(known):
        yield from _changed(context, (asked, whose), (applied, where))


def _changed(
    context: StepContext, configured: tuple[dict[str, float], str], effective: tuple[dict[str, float], str]
) -> Iterator[Discrepancy]:
    (asked, whose), (applied, where) = configured, effective
    wrong = [key for key in _ADAM if key in asked and key in applied and not _same(asked[key], applied[key])]
    rules = {
        "weight_decay": (
            "weight-decay-lost",
            "weight decay was not passed to the service: the combined call of an SDK drops it, or the service's "
            "default took its place",
        ),
        "grad_clip_norm": (
            "clipping-lost",
            "gradient clipping was not passed to the service: the combined call of an SDK drops it, or the service "
            "ignores it",
        ),
    }
    for key in wrong:
        if key in rules and asked[key] and not applied[key]:
            rule, cause = rules[key]
            proof = f"{key}: {whose} {asked[key]:g}, {where} {applied[key]:g}"
            yield Discrepancy(rule, cause, (proof, *_norms(context, key, asked[key])), ("param", "optimizer"))
    others = [key for key in wrong if key not in rules or not (asked[key] and not applied[key])]
    if others:
        yield Discrepancy(
            "optimizer-settings",
            "the optimizer step was made with other settings than configured: a default of the SDK or of the service "
            "took the place of what was not passed",
            tuple(f"{key}: {whose} {asked[key]:g}, {where} {applied[key]:g}" for key in others),
            ("param", "optimizer"),
        )


def _norms(context: StepContext, key: str, limit: float) -> list[str]:
    norms = _gradient_norms(context)
    if key != "grad_clip_norm" or norms is None or not norms[0] > limit:
        return []
    return [f"the gradient norm of {norms[0]:.6g} was {norms[1]:.6g} after clipping to {limit:g}"]


def _clipping(context: StepContext) -> Iterator[Discrepancy]:
    """Yield clipping that was asked for and passed on, and did not happen."""
    asked, applied = _of_client(context)[0] or _of_trainer(context)[0], _applied(context)[0]
    limit, norms = asked.get("grad_clip_norm"), _gradient_norms(context)
    if not limit or norms is None or not _same(limit, applied.get("grad_clip_norm", limit)):
        return
    norm, clipped = norms
    if norm > limit * (1 + 1e-4) and clipped > limit * (1 + 1e-4):
        yield Discrepancy(
            "clipping-lost",
            "the gradient was not clipped, although the service has the limit",
            (f"the gradient norm of {norm:.6g} was {clipped:.6g} after clipping to {limit:g}",),
            ("param", "optimizer"),
        )


def _of_client(context: StepContext) -> tuple[dict[str, float], str]:
    given = {} if context.client is None else _numbers(context.client.setting("adam_params"))
    return given, f"{CLIENT} is configured with"


def _of_trainer(context: StepContext) -> tuple[dict[str, float], str]:
    """Return the settings of the optimizer of the self-hosted run; of a schedule nothing tells the rate."""
    section = context.config.get("optimizer") or {}
    betas = section.get("betas")
    if not isinstance(betas, list) or len(betas) != 2 or section.get("factory") is not None:
        return {}, ""
    found = {
        "beta1": betas[0],
        "beta2": betas[1],
        **{key: section.get(key) for key in ("eps", "weight_decay")},
    }
    if section.get("lr_scheduler") == "constant" and not section.get("warmup_steps"):
        found["learning_rate"] = section.get("learning_rate")
    found["grad_clip_norm"] = section.get("max_grad_norm") or 0.0
    return _numbers(found), f"{TRAINER} has"


def _applied(context: StepContext) -> tuple[dict[str, float], str]:
    """Return the settings of the optimizer that took effect, and by which account."""
    step = context.optim_step
    if step is not None and step.adam:
        return _numbers(step.adam), "the service applied"
    if context.client is None:
        return {}, ""
    return _numbers(context.client.optimizer), "the service's metrics name"


def _gradient_norms(context: StepContext) -> tuple[float, float] | None:
    step = context.optim_step
    given = _numbers(step.metrics if step is not None else context.client.optimizer if context.client else {})
    found = given.get("grad_norm"), given.get("clipped_grad_norm")
    return None if found[0] is None or found[1] is None else (found[0], found[1])


def _temperature(context: StepContext) -> Iterator[Discrepancy]:
    asked = None if context.client is None else context.client.asked.get("temperature")
    known = {row.temperature for row in context.trainer if row.temperature is not None}
    if not isinstance(asked, int | float) or len(known) != 1 or _same(asked, *known):
        return
    yield Discrepancy(
        "other-temperature",
        "the client samples at another temperature, so that log-probs are of other distributions",
        (f"{CLIENT} samples at {asked:g}, {TRAINER} at {known.pop():g}",),
        ("trajectory", "log_probs", "old_log_probs"),
    )


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {
        key: float(value)
        for key, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=_CLOSE)
    return bool(one == other)
