"""Configuration of the objective as plain values; imports no torch.

Engines with a loss of the same name differ in constants and conventions (epsilon, degrees of freedom,
denominators, the meaning of a cap), so every one of them is a field here; presets set them.
"""

from __future__ import annotations

from dataclasses import dataclass

from regress.grpo.fields import ObjectiveFields
from regress.grpo.objective_checks import check_objective


@dataclass
class Objective(ObjectiveFields):
    """Advantages, loss, KL, entropy, denominators and rollout corrections of one policy update.

    Field metadata holds ``help`` and, where they apply, ``choices`` and ``minimum``.

    Raises:
        ConfigError: for a value that is not allowed, alone or beside the others.
    """

    def __post_init__(self) -> None:
        check_objective(self)
