"""``regress objective``: presets, fields and parts of the objective, as text."""

from __future__ import annotations

from dataclasses import fields

import click

from regress.grpo.objective import Objective
from regress.grpo.objective_catalogue import CATALOGUE
from regress.grpo.objective_presets import PRESETS, make_objective
from regress.grpo.preset_recipes import RECIPES
from regress.printable_text import echo


@click.command()
@click.argument("preset", required=False)
@click.option(
    "--fields", "all_fields", is_flag=True, help="Every field of the objective: default, choices, meaning."
)
@click.option("--parts", is_flag=True, help="Every loss, estimator and rule: formula and source.")
def objective(preset: str | None, all_fields: bool, parts: bool) -> None:
    """Say what a preset reproduces, and what the fields of an objective mean.

    \b
    regress objective                 every preset and what it reproduces
    regress objective trl:cispo       its fields, those that it sets marked with *
    regress objective --fields
    regress objective --parts

    Fields are set as algorithm.<field>=<value> in a configuration, presets as algorithm.preset=<name>.
    """
    if all_fields:
        echo("\n".join(field_lines()))
    elif parts:
        echo("\n".join(part_lines()))
    elif preset is not None:
        echo("\n".join(preset_lines(preset)))
    else:
        width = max(map(len, RECIPES))
        echo("\n".join(f"{name:{width}}  {recipe.reproduces}" for name, recipe in RECIPES.items()))


def preset_lines(name: str) -> list[str]:
    """Return a preset as text: what it reproduces, and the value of every field.

    Raises:
        ConfigError: if there is none of that name.
    """
    found = make_objective(name)
    rows = [f"{name}: {RECIPES[name].reproduces}"]
    for spec in fields(found):
        mark = "*" if spec.name in PRESETS[name] else " "
        rows.append(f"{mark} {spec.name}: {_text(getattr(found, spec.name))}")
    return rows


def field_lines() -> list[str]:
    """Return every field as text: name, default, meaning and choices."""
    rows = []
    for spec in fields(Objective):
        choices = spec.metadata.get("choices", ())
        known = f" [{', '.join(choices)}]" if choices else ""
        rows.append(
            f"{spec.name} ({spec.type}, default {_text(spec.default)}): {spec.metadata['help']}{known}"
        )
    return rows


def part_lines() -> list[str]:
    """Return every part as text: field, name, formula and source."""
    pairs = [(kind, name, part) for kind, known in CATALOGUE.items() for name, part in known.items()]
    return [f"{kind}={name}: {part.text} ({part.source})" for kind, name, part in pairs]


def _text(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
