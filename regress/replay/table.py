"""Variants of a project: those of this package, and the project's own rows in pyproject.toml."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from regress.errors import ConfigError
from regress.project import project_section
from regress.replay.layouts import LAYOUTS
from regress.replay.remote_variants import REMOTE
from regress.replay.rollout_variants import ROLLOUTS
from regress.replay.rows import parse_variants
from regress.replay.variant_rows import VARIANTS
from regress.replay.variants import Variant


def project_variants(root: Path, added: Iterable[Variant] = ()) -> dict[str, Variant]:
    """Return the built-in variants, those of ``[tool.regress.variants]`` in ``root/pyproject.toml``, and
    those ``added``.

    A row of an existing name replaces that variant.

    Raises:
        ConfigError: naming the row and what is wrong with it.
    """
    table = {**VARIANTS, **LAYOUTS, **REMOTE, **ROLLOUTS}
    table |= parse_variants(_rows(root), f"{root / 'pyproject.toml'}: [tool.regress.variants]")
    table |= _added(added)
    for variant in table.values():
        _check_twin(variant, table)
    return table


def _added(variants: Iterable[Variant]) -> dict[str, Variant]:
    table: dict[str, Variant] = {}
    for variant in variants:
        if not isinstance(variant, Variant):
            raise ConfigError(
                f"pytest_regress_variants gave {variant!r}; give a list of regress.replay.variants.Variant"
            )
        if variant.name in table:
            raise ConfigError(
                f"pytest_regress_variants: two variants are called {variant.name!r}; rename one"
            )
        row = {spec.name: getattr(variant, spec.name) for spec in fields(variant) if spec.name != "name"}
        table |= parse_variants({variant.name: row}, "pytest_regress_variants")
    return table


def _rows(root: Path) -> Mapping[str, Any]:
    rows = project_section(root, "variants")
    if rows is not None and not isinstance(rows, Mapping):
        raise ConfigError(
            f"{root / 'pyproject.toml'}: tool.regress.variants must be tables, one a variant; correct {rows!r}"
        )
    return rows or {}


def _check_twin(variant: Variant, table: Mapping[str, Variant]) -> None:
    if variant.twin is not None and variant.twin not in table:
        raise ConfigError(
            f"variant {variant.name!r} has the twin {variant.twin!r}, which is no variant; choose one of "
            + ", ".join(table)
        )
