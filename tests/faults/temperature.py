"""Faults of the temperature that logits are divided by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from regress.engine import policy
from regress.grpo.logprobs import token_log_probs
from tests.faults.fault import fault
from tests.faults.patch import Patch


@fault(
    category="H",
    source="TRL PR#3029, NeMo-RL PR#935",
    first="log_probs log_probs",
    place="step0/rank0/micro0",
    cases=("dr_grpo",),
    tokens="all",
    rules=("temperature",),
    calibration=True,
    silent={"dense/mbs4": "the temperature is 1"},
)
def temperature_ignored(patch: Patch) -> None:
    """Samples are drawn from tempered logits, and scored by plain ones."""
    right: Any = token_log_probs
    patch.setattr(policy, "token_log_probs", lambda *args, temperature, **rest: right(*args, **rest))


@fault(
    category="H",
    source="a temperature that is rounded on its way",
    first="log_probs log_probs",
    tokens="all",
    rules=("temperature",),
    small=True,
    calibration=True,
)
def temperature_off(patch: Patch) -> None:
    """The temperature is 0.79 in place of 0.80."""
    right: Any = token_log_probs
    patch.setattr(
        policy,
        "token_log_probs",
        lambda *args, temperature, **rest: right(*args, temperature=temperature * 0.79 / 0.80, **rest),
    )


def tempered(patch: Patch, change: Callable[[float], float]) -> None:
    """Take log-probs at another temperature."""
    right: Any = token_log_probs
    patch.setattr(
        policy,
        "token_log_probs",
        lambda *args, temperature, **rest: right(*args, temperature=change(temperature), **rest),
    )


@fault(
    category="H",
    source="GMISWE/tinker-cloud PR#26",
    first="log_probs log_probs",
    cases=("dr_grpo",),
    tokens="all",
    rules=("temperature",),
    silent={"dense/mbs4": "the temperature is 1"},
)
def temperature_twice(patch: Patch) -> None:
    """Logits are divided by the temperature twice."""
    tempered(patch, lambda temperature: temperature**2)


@fault(
    category="H",
    source="a temperature that multiplies",
    first="log_probs log_probs",
    cases=("dr_grpo",),
    tokens="all",
    rules=("temperature",),
)
def temperature_inverted(patch: Patch) -> None:
    """Logits are multiplied by the temperature."""
    tempered(patch, lambda temperature: 1.0 / temperature)
