"""Faults of the temperature that logits are divided by."""

from regress.engine import causal_lm_policy
from regress.grpo.selective_log_softmax import token_log_probs
from regress.replay.fault_injection import around, by
from regress.replay.probes.loss_probes import temperature_off
from tests.faults.fault import fault, met_in


@fault(
    "H",
    "log_probs log_probs",
    "temperature",
    on="dr_grpo/mbs4",
    place="step0/rank0/micro0",
    tokens="all",
    silent={"dense/mbs4": "the temperature is 1"},
)
@met_in("TRL PR#3029, NeMo-RL PR#935")
@around(causal_lm_policy, "token_log_probs")
def temperature_ignored(right, *args, temperature, **rest):
    """Samples are drawn from tempered logits, and scored by plain ones."""
    return right(*args, **rest)


fault("H", "log_probs log_probs", "temperature", tokens="all")(
    met_in("a temperature that is rounded on its way")(temperature_off)
)


def tempered(patch, change):
    """Take log-probs at another temperature."""
    right = token_log_probs
    patch.setattr(
        causal_lm_policy,
        "token_log_probs",
        lambda *args, temperature, **rest: right(*args, temperature=change(temperature), **rest),
    )


@fault(
    "H",
    "log_probs log_probs",
    "temperature",
    on="dr_grpo/mbs4",
    tokens="all",
    silent={"dense/mbs4": "the temperature is 1"},
)
@met_in("GMISWE/tinker-cloud PR#26")
@by(tempered)
def temperature_twice(temperature):
    """Logits are divided by the temperature twice."""
    return temperature**2


@fault("H", "log_probs log_probs", "temperature", on="dr_grpo/mbs4", tokens="all")
@met_in("a temperature that multiplies")
@by(tempered)
def temperature_inverted(temperature):
    """Logits are multiplied by the temperature."""
    return 1.0 / temperature
