"""Variants by name: the rows of ``variants.toml``, and a project's own, as TOML tables or from a hook."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from regress.errors import ConfigError
from regress.plugins import VARIANTS as REGISTERED
from regress.plugins import load, registered
from regress.project_settings import project_section
from regress.replay.case_traits import TRAITS
from regress.replay.variant import ANY, SEMANTICS, TRAIT, Precision, Variant
from regress.replay.variant_names import overrides_of


def project_variants(root: Path, added: Iterable[Variant] = ()) -> dict[str, Variant]:
    """Return the built-in variants, those that are registered, those of ``[tool.regress.variants]`` in
    ``root/pyproject.toml``, and those ``added``.

    A row of an existing name replaces that variant.

    Raises:
        ConfigError: naming the row and what is wrong with it.
    """
    table = dict(VARIANTS)
    for point in registered(REGISTERED).values():
        table |= load(point)
    table |= parse_variants(_own_rows(root), f"{root / 'pyproject.toml'}: [tool.regress.variants]")
    table |= _added(added)
    for variant in table.values():
        _check_bitwise_reference(variant, table)
    return table


def _added(variants: Iterable[Variant]) -> dict[str, Variant]:
    table: dict[str, Variant] = {}
    for variant in variants:
        if not isinstance(variant, Variant):
            raise ConfigError(
                f"pytest_regress_variants gave {variant!r}; give a list of regress.replay.variant.Variant"
            )
        if variant.name in table:
            raise ConfigError(
                f"pytest_regress_variants: two variants are called {variant.name!r}; rename one"
            )
        row = {spec.name: getattr(variant, spec.name) for spec in fields(variant) if spec.name != "name"}
        table |= parse_variants({variant.name: row}, "pytest_regress_variants")
    return table


def _own_rows(root: Path) -> Mapping[str, Any]:
    rows = project_section(root, "variants")
    if rows is not None and not isinstance(rows, Mapping):
        raise ConfigError(
            f"{root / 'pyproject.toml'}: tool.regress.variants must be tables, one a variant; correct {rows!r}"
        )
    return rows or {}


def _check_bitwise_reference(variant: Variant, table: Mapping[str, Variant]) -> None:
    if variant.bitwise_reference is not None and variant.bitwise_reference not in table:
        raise ConfigError(f"""variant {variant.name!r} has the bitwise_reference {variant.bitwise_reference!r}, which is
        not a variant; choose one of {", ".join(table)}""")


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*", re.ASCII)


def parse_variants(table: Mapping[str, Any], origin: str) -> dict[str, Variant]:
    """Return variants from plain data: name -> ``{why, overrides, precisions, cases, bitwise_reference}``.

    Without ``overrides`` they are those that the name spells out, if it does.

    Raises:
        ConfigError: naming ``origin``, the variant, and what is wrong with it.
    """
    return {name: _parse(name, row, f"{origin}: variant {name!r}") for name, row in table.items()}


def check_name(name: object, stated: str) -> None:
    """Raise `ConfigError` for a name unfit for test ids, patterns and paths, or that reads as a precision."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{stated} cannot stand in a test id; choose letters, digits and dashes")
    for precision in Precision:
        if precision.suffix and name.endswith(precision.suffix):
            raise ConfigError(f"""{stated} ends with {precision.suffix}, which test ids add for the precision
            {precision}; choose another name""")


def _parse(name: str, row: Any, stated: str) -> Variant:
    known = [spec.name for spec in fields(Variant) if spec.name != "name"]
    if not isinstance(row, Mapping):
        raise ConfigError(f"{stated} must be a table with keys of {', '.join(known)}; correct {row!r}")
    for key in row:
        if key not in known:
            raise ConfigError(f"{stated} has the key {key!r}; choose from {', '.join(known)}")
    if not isinstance(row.get("why"), str) or not row["why"].strip():
        raise ConfigError(f'{stated} does not say why it exists; add why = "what it could break"')
    check_name(name, stated)
    overrides = row.get("overrides", overrides_of(name) or {})
    if not isinstance(overrides, Mapping):
        raise ConfigError(f"{stated} has the overrides {overrides!r}; give a table of dotted keys and values")
    precisions = _precisions(row, stated)
    cases, possible = (_patterns(row, key, stated) for key in ("cases", "possible"))
    bitwise_reference = row.get("bitwise_reference")
    if (Precision.BITWISE in precisions) != (bitwise_reference is not None):
        raise ConfigError(
            f"{stated}: precision bitwise and bitwise_reference (whose bytes to reproduce) go together; give both"
        )
    resume_at, before = _two_processes(row, overrides, stated)
    program = row.get("program", resume_at is not None)
    if not isinstance(program, bool) or (resume_at is not None and not program):
        raise ConfigError(
            f"{stated} has the program {program!r}; give true or false, and true with resume_at"
        )
    combines = row.get("combines", False)
    if not isinstance(combines, bool):
        raise ConfigError(f"{stated} has the combines {combines!r}; give true or false")
    two = (resume_at, before, program, combines)
    return Variant(
        name, row["why"], dict(flat(overrides)), precisions, cases, bitwise_reference, possible, *two
    )


def _two_processes(
    row: Mapping[str, Any], overrides: Mapping[str, Any], stated: str
) -> tuple[int | None, dict[str, Any] | None]:
    at, before = row.get("resume_at"), row.get("before")
    if at is not None and (type(at) is not int or at < 1):
        raise ConfigError(f"{stated} has the resume_at {at!r}; give a number of optimizer updates, 1 or more")
    if before is not None and not isinstance(before, Mapping):
        raise ConfigError(f"{stated} has the before {before!r}; give a table of dotted keys and values")
    if before is not None and at is None:
        raise ConfigError(f"{stated} tells of a process before and of no resume_at; give both")
    if at is None:
        return None, None
    return at, dict(flat(overrides if before is None else before))


def _precisions(row: Mapping[str, Any], stated: str) -> tuple[Precision, ...]:
    given = _list(row.get("precisions", SEMANTICS))
    known = [str(precision) for precision in Precision]
    if not given or not all(value in known for value in given) or len(set(given)) < len(given):
        raise ConfigError(
            f"{stated} has the precisions {row['precisions']!r}; choose from {', '.join(known)}, each once"
        )
    return tuple(Precision(value) for value in given)


def _patterns(row: Mapping[str, Any], key: str, stated: str) -> tuple[str, ...]:
    found = tuple(_list(row.get(key, ["*"])))
    full_matrix_alone = key == "cases" and "possible" in row
    if not (found or full_matrix_alone) or not all(isinstance(pattern, str) for pattern in found):
        raise ConfigError(f"{stated} has the {key} {row[key]!r}; give names of cases, or patterns of them")
    known = (*TRAITS, ANY)
    for pattern in found:
        if pattern.startswith(TRAIT) and pattern not in known:
            raise ConfigError(
                f"{stated} has the {key} {pattern!r}, which is not a trait; choose one of {', '.join(known)}"
            )
    return found


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Yield dotted key and value of nested tables: TOML reads ``batching.layout = "packed"`` as nested."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


_TABLE = Path(__file__).with_name("variants.toml")
VARIANTS: Mapping[str, Variant] = parse_variants(
    tomllib.loads(_TABLE.read_text(encoding="utf-8")), _TABLE.name
)
"""Variants of this package, by name."""
BASE = VARIANTS["base"]
"""Layout that golden values are computed in: right padded, one microbatch."""
