"""All rules of the diagnosis, read from the tables beside this module, theme by theme."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from regress.compare.diagnosis.diagnosis_rule import Rule
from regress.compare.diagnosis.rules.rule_conditions import CONDITIONS
from regress.compare.verdicts.verdict import Status

OF_GOLDEN = "invariant-alone"
"""Rule for faults although every golden value holds; a single dump has no golden values."""
_THEMES = ("inputs", "model", "loss", "gradients", "update")


def _read(theme: str) -> Iterator[Rule]:
    """Yield the rules of one table, whose headers are their ids and whose keys are fields of `Rule`."""
    text = files("regress.compare.diagnosis.rules").joinpath(f"{theme}.toml").read_text("utf-8")
    for id, row in tomllib.loads(text).items():
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in row.items()
        }
        fields["status"] = tuple(Status(name) for name in fields.get("status", ()))
        fields["when"] = tuple(CONDITIONS[name] for name in fields.get("when", ()))
        yield Rule(id, **fields)


RULES: tuple[Rule, ...] = tuple(rule for theme in _THEMES for rule in _read(theme))
