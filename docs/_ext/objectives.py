"""Directive ``objectives``: tables of presets, parts and fields of the objective, made from the code."""

from dataclasses import fields
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive

from regress.grpo.objective import Objective
from regress.grpo.objective_catalogue import CATALOGUE
from regress.grpo.preset_recipes import RECIPES


class Objectives(Directive):
    """Table of ``presets``, ``parts`` or ``fields``."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        header, rows = {"presets": _presets, "parts": _parts, "fields": _fields}[self.arguments[0]]()
        return [_table(header, rows)]


def _presets() -> tuple[list[str], list[list[str]]]:
    return ["preset", "reproduces", "fields it sets"], [
        [name, recipe.reproduces, ", ".join(f"{key}={value}" for key, value in recipe.values.items())]
        for name, recipe in RECIPES.items()
    ]


def _parts() -> tuple[list[str], list[list[str]]]:
    return ["field", "name", "formula", "source"], [
        [kind, name, part.text, part.source]
        for kind, parts in CATALOGUE.items()
        for name, part in parts.items()
    ]


def _fields() -> tuple[list[str], list[list[str]]]:
    return ["field", "default", "meaning"], [
        [spec.name, str(spec.default), spec.metadata["help"]] for spec in fields(Objective)
    ]


def _table(header: list[str], rows: list[list[str]]) -> nodes.table:
    group = nodes.tgroup(cols=len(header))
    group += [nodes.colspec(colwidth=1) for _ in header]
    head, body = nodes.thead(), nodes.tbody()
    head += _row(header)
    body += [_row(row) for row in rows]
    group += [head, body]
    table = nodes.table()
    table += group
    return table


def _row(cells: list[str]) -> nodes.row:
    row = nodes.row()
    for cell in cells:
        entry = nodes.entry()
        entry += nodes.paragraph(text=cell)
        row += entry
    return row


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("objectives", Objectives)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
