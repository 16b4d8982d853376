"""Objective of the training."""

from dataclasses import dataclass

from regress.engine.config.sections.value import value
from regress.grpo.objective import Objective
from regress.grpo.presets import PRESETS


@dataclass
class AlgorithmConfig(Objective):
    """Objective."""

    preset: str | None = value(
        None, "named objective that sets the fields nobody set explicitly", choices=tuple(PRESETS)
    )
    loss_function: str | None = value(
        None,
        "your own loss of each token, as package.module:function with the signature and result of "
        "regress.grpo.losses.token_loss; null: that one",
    )
