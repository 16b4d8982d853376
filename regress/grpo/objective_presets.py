"""Named objectives: the papers' under plain names, engines' under ``engine:name``. Imports no torch.

``trl:*`` reproduce TRL 1.16 (``GRPOTrainer``; ``trl:rloo`` its ``RLOOTrainer``), ``verl:*`` verl 0.9. What each of
them reproduces exactly is in `regress.grpo.preset_recipes`; tests that run those packages hold them to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from regress.errors import ConfigError
from regress.grpo.objective import Objective
from regress.grpo.preset_recipes import RECIPES

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {name: recipe.values for name, recipe in RECIPES.items()}
)
"""Fields that each preset sets."""


def preset_values(name: str) -> Mapping[str, Any]:
    """Return the fields that preset ``name`` sets; `ConfigError` names the nearest preset if there is none."""
    if name not in PRESETS:
        near = get_close_matches(name, PRESETS, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"preset={name!r} is unknown: the nearest preset is {near!r}, of {', '.join(PRESETS)}."
        )
    return PRESETS[name]


def make_objective(preset: str | None = None, **overrides: Any) -> Objective:
    """Return a checked `Objective`: defaults, then the preset's fields, then ``overrides``. Raises
    `ConfigError`.
    """
    known = [spec.name for spec in fields(Objective)]
    for name in overrides:
        if name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ConfigError(f"{name} is not a field of the objective: the nearest is {near}.")
    values = dict(preset_values(preset)) if preset is not None else {}
    return Objective(**(values | overrides))
