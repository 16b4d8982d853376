"""One value against the rules of its key: conversion to the field's type, choices and bounds."""

import math
import re
from typing import Any

from regress.engine.config.leaves import Leaf
from regress.engine.config.nearest import nearest
from regress.engine.config.origins import Origin
from regress.engine.config.text import shortened
from regress.errors import ConfigError

NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "text", dict: "a mapping"}
BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
INTEGER = re.compile(r"[+-]?[0-9]+(_[0-9]+)*")


def checked(leaf: Leaf, value: Any, origin: Origin) -> Any:
    """``value`` in the type of ``leaf``; text is read as the type asks, as in OmegaConf's structured configs.

    Raises `ConfigError` naming key, value, origin and rule if it does not fit.
    """
    if value is None and leaf.optional:
        return None
    try:
        converted = _convert(leaf, value)
    except ValueError as error:
        given = f"{leaf.key}={shortened(value)} ({origin})"
        raise ConfigError(f"{given} must be {_rule(leaf)}{error}{_hint(leaf, value)}") from None
    return converted


def _convert(leaf: Leaf, value: Any) -> Any:
    """Raises ``ValueError`` whose text, often empty, is what the rule alone does not say."""
    if leaf.kind is list:
        return _list(leaf, value)
    if leaf.kind is dict:
        return _mapping(leaf, value)
    scalar = _scalar(leaf.kind, value)
    if "choices" in leaf.rules and scalar not in leaf.rules["choices"]:
        raise ValueError("")
    if leaf.rules.get("regex"):
        _compile(scalar)
    if leaf.kind in (int, float):
        _bounds(leaf, scalar)
    return scalar


def _scalar(kind: Any, value: Any) -> Any:
    if kind is Any:
        return _plain(value)
    if value is None or isinstance(value, dict | list):
        raise ValueError("")
    if kind is str:
        return str(value).lower() if isinstance(value, bool) else str(value)
    if kind is bool:
        return BOOLEANS[_one_of(str(value).lower(), BOOLEANS)]
    if isinstance(value, bool):
        raise ValueError("")
    if kind is int:
        if isinstance(value, float) or not INTEGER.fullmatch(str(value).strip()):
            raise ValueError("")
        return int(value)
    try:
        return _finite(float(value))
    except ValueError:
        raise ValueError(", finite") if _is_non_finite(value) else ValueError("") from None


def _one_of(name: str, names: dict[str, bool]) -> str:
    if name not in names:
        raise ValueError("")
    return name


def _is_non_finite(value: Any) -> bool:
    return isinstance(value, float) or str(value).strip().lower().lstrip("+-.") in ("nan", "inf", "infinity")


def _finite(number: float) -> float:
    if not math.isfinite(number):
        raise ValueError(", finite")
    return number


def _plain(value: Any) -> Any:
    """Anything that JSON can hold."""
    if isinstance(value, dict):
        return {key: _plain(member) for key, member in value.items()}
    if isinstance(value, list):
        return [_plain(member) for member in value]
    return _finite(value) if isinstance(value, float) else value


def _list(leaf: Leaf, value: Any) -> list[Any]:
    if not isinstance(value, list) or len(value) != leaf.rules.get("length", len(value)):
        raise ValueError("")
    numbers = [_scalar(leaf.item, member) for member in value]
    for number in numbers:
        _bounds(leaf, number)
    return numbers


def _mapping(leaf: Leaf, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("")
    return dict(value)


def _compile(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f" and this one is invalid ({error}); escape special characters with \\") from None


def _bounds(leaf: Leaf, number: float) -> None:
    rules = leaf.rules
    inside = (
        ("minimum" not in rules or number >= rules["minimum"])
        and ("exclusive_minimum" not in rules or number > rules["exclusive_minimum"])
        and ("maximum" not in rules or number <= rules["maximum"])
        and ("exclusive_maximum" not in rules or number < rules["exclusive_maximum"])
    )
    if not inside:
        raise ValueError("")


def _rule(leaf: Leaf) -> str:
    if "choices" in leaf.rules:
        return f"one of {', '.join(leaf.rules['choices'])}"
    if leaf.rules.get("regex"):
        return "a regular expression"
    if leaf.kind is list:
        name = f"a list of {leaf.rules['length']} numbers"
    else:
        name = NAMES.get(leaf.kind, "a finite value")
    limits = (
        ("minimum", "of at least {:g}"),
        ("exclusive_minimum", "greater than {:g}"),
        ("maximum", "at most {:g}"),
        ("exclusive_maximum", "less than {:g}"),
    )
    bounds = " and ".join(text.format(leaf.rules[limit]) for limit, text in limits if limit in leaf.rules)
    return f"{name} {bounds}".rstrip() + (" or null" if leaf.optional else "")


def _hint(leaf: Leaf, value: Any) -> str:
    if "choices" in leaf.rules:
        return f"; did you mean {nearest(str(value), leaf.rules['choices'])}?"
    return "."
