"""``regress objective``: presets, fields and parts of the objective, as text."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

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
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def objective(preset: str | None, all_fields: bool, parts: bool, as_json: bool) -> None:
    """Say what a preset reproduces, and what the fields of an objective mean.

    \b
    regress objective                 every preset and what it reproduces
    regress objective trl:cispo       its fields, those that it sets marked with *
    regress objective --fields
    regress objective --parts

    Fields are set as algorithm.<field>=<value> in a configuration, presets as algorithm.preset=<name>.
    """
    data: dict[str, Any]
    if all_fields:
        lines, data = field_lines(), {"fields": _field_rows()}
    elif parts:
        lines, data = part_lines(), {"parts": _part_rows()}
    elif preset is not None:
        lines, data = preset_lines(preset), _preset_data(preset)
    else:
        width = max(map(len, RECIPES))
        lines = [f"{name:{width}}  {recipe.reproduces}" for name, recipe in RECIPES.items()]
        data = {"presets": {name: recipe.reproduces for name, recipe in RECIPES.items()}}
    echo(
        json.dumps({"schema_version": 1, **data}, indent=1, allow_nan=False) if as_json else "\n".join(lines)
    )


def preset_lines(name: str) -> list[str]:
    """Return a preset as text: what it reproduces, and the value of every field.

    Raises:
        ConfigError: if there is none of that name.
    """
    found = _preset_data(name)
    rows = [
        f"{'*' if row['set'] else ' '} {key}: {_text(row['value'])}" for key, row in found["fields"].items()
    ]
    return [f"{name}: {found['reproduces']}", *rows]


def field_lines() -> list[str]:
    """Return every field as text: name, default, meaning and choices."""
    rows = []
    for row in _field_rows():
        known = f" [{', '.join(row['choices'])}]" if row["choices"] else ""
        rows.append(f"{row['name']} ({row['type']}, default {_text(row['default'])}): {row['help']}{known}")
    return rows


def part_lines() -> list[str]:
    """Return every part as text: field, name, formula and source."""
    return ["{field}={name}: {formula} ({source})".format_map(row) for row in _part_rows()]


def _preset_data(name: str) -> dict[str, Any]:
    found = make_objective(name)
    rows = {
        spec.name: {"value": getattr(found, spec.name), "set": spec.name in PRESETS[name]}
        for spec in fields(found)
    }
    return {"preset": name, "reproduces": RECIPES[name].reproduces, "fields": rows}


def _field_rows() -> list[dict[str, Any]]:
    return [
        {
            "name": spec.name,
            "type": spec.type,
            "default": spec.default,
            "choices": [*spec.metadata.get("choices", ())],
            "help": spec.metadata["help"],
        }
        for spec in fields(Objective)
    ]


def _part_rows() -> list[dict[str, str]]:
    return [
        {"field": kind, "name": name, "formula": part.text, "source": part.source}
        for kind, known in CATALOGUE.items()
        for name, part in known.items()
    ]


def _text(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
