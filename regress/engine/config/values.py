"""Checks of one value against the rules of its key: conversion to the field's type, choices and bounds."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from regress.engine.config.leaves import Leaf
from regress.engine.config.nearest import nearest
from regress.engine.config.origins import Origin
from regress.engine.config.text import shortened
from regress.errors import ConfigError

BOOLEANS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}
INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
NAMES: Mapping[Any, str] = {
    str: "text",
    bool: "true or false",
    int: "an integer",
    float: "a finite number",
    dict: "a mapping",
    Any: "made of text, finite numbers, booleans, lists and mappings",
}
LIMITS: Mapping[str, tuple[str, Callable[[float, float], bool]]] = {
    "minimum": ("of at least {:.15g}", lambda number, limit: number >= limit),
    "exclusive_minimum": ("greater than {:.15g}", lambda number, limit: number > limit),
    "maximum": ("at most {:.15g}", lambda number, limit: number <= limit),
    "exclusive_maximum": ("less than {:.15g}", lambda number, limit: number < limit),
}


class _MisfitError(Exception):
    """A value breaks the rule of its leaf; the text, often empty, adds what the rule alone does not say."""


def checked(leaf: Leaf, value: Any, origin: Origin) -> Any:
    """Return ``value`` in the type of ``leaf``; text is converted as OmegaConf does.

    Raises `ConfigError` naming key, value, origin and rule if it does not fit.
    """
    if value is None and leaf.optional:
        return None
    try:
        return _within_rules(leaf, _read(leaf, value))
    except _MisfitError as misfit:
        stated = f"{leaf.key}={shortened(value)} ({origin}) must be {_rule(leaf)}{misfit}"
    if "choices" in leaf.rules:
        raise ConfigError(f"{stated}; did you mean {nearest(str(value), _choices(leaf))}?")
    raise ConfigError(f"{stated}.")


def _read(leaf: Leaf, value: Any) -> Any:
    if leaf.kind is list:
        return [_SCALARS[leaf.item](member) for member in _instance(list, value)]
    if leaf.kind is dict:
        return {str(name): member for name, member in _instance(dict, value).items()}
    return _SCALARS[leaf.kind](value)


def _text(value: Any) -> str:
    if value is None or isinstance(value, dict | list):
        raise _MisfitError
    if "\0" in str(value):
        raise _MisfitError(" without the character NUL, which no path and no variable can hold")
    return str(value).lower() if isinstance(value, bool) else str(value)


def _boolean(value: Any) -> bool:
    if str(value).lower() not in BOOLEANS:
        raise _MisfitError
    return BOOLEANS[str(value).lower()]


def _integer(value: Any) -> int:
    if not INTEGER.fullmatch(str(value)):
        raise _MisfitError
    return int(value)


def _number(value: Any) -> float:
    if isinstance(value, bool | dict | list) or value is None:
        raise _MisfitError
    try:
        number = float(value)
    except ValueError:
        raise _MisfitError from None
    if not math.isfinite(number):
        raise _MisfitError
    return number


def _plain(value: Any) -> Any:
    """Return the value as JSON can hold it, with names as text."""
    if isinstance(value, dict):
        return {str(name): _plain(member) for name, member in value.items()}
    if isinstance(value, list):
        return [_plain(member) for member in value]
    if isinstance(value, float):
        return _number(value)
    if value is None or isinstance(value, str | bool | int):
        return value
    raise _MisfitError


_SCALARS: Mapping[Any, Callable[[Any], Any]] = {
    str: _text,
    bool: _boolean,
    int: _integer,
    float: _number,
    Any: _plain,
}


def _instance(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise _MisfitError
    return value


def _within_rules(leaf: Leaf, value: Any) -> Any:
    rules = leaf.rules
    if "choices" in rules and value not in rules["choices"] and value not in _choices(leaf):
        raise _MisfitError
    if "length" in rules and len(value) != rules["length"]:
        raise _MisfitError
    for name, (_, holds) in LIMITS.items():
        for number in value if leaf.kind is list else [value]:
            if name in rules and not holds(number, rules[name]):
                raise _MisfitError
    if rules.get("regex"):
        _compiles(value)
    return value


def _choices(leaf: Leaf) -> tuple[str, ...]:
    """Return all choices, also those that it takes an import to know."""
    more = leaf.rules.get("more")
    return (*leaf.rules["choices"], *(more() if more else ()))


def _compiles(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise _MisfitError(f", which it is not: {error}; write special characters with \\") from None


def _list_name(leaf: Leaf) -> str:
    length, members = leaf.rules.get("length"), "names" if leaf.item is str else "numbers"
    return f"a list of {members}" if length is None else f"a list of {length} {members}"


def _rule(leaf: Leaf) -> str:
    if "choices" in leaf.rules:
        more = f", or {leaf.rules['others']}" if "others" in leaf.rules else ""
        return f"one of {', '.join(leaf.rules['choices'])}{more}"
    if leaf.rules.get("regex"):
        return "a regular expression"
    name = _list_name(leaf) if leaf.kind is list else NAMES[leaf.kind]
    limits = [text.format(leaf.rules[limit]) for limit, (text, _) in LIMITS.items() if limit in leaf.rules]
    return f"{name} {' and '.join(limits)}".rstrip() + (" or null" if leaf.optional else "")
