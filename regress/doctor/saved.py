"""The configuration that a checkpoint holds, as an object again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from regress.engine.config.option import Option
from regress.engine.config.schema import Config, options


def saved_config(saved: Mapping[str, Any]) -> Config:
    """Return the configuration of dotted keys and plain values; keys that are missing have their defaults.

    Raises:
        ValueError: if a value is not of its key's type.
    """
    config = Config()
    for key, leaf in options().items():
        if leaf.kind is dict:
            value: Any = {
                name.removeprefix(f"{key}."): item
                for name, item in saved.items()
                if name.startswith(f"{key}.")
            }
            if not value and saved.get(key) != "{}":
                continue
        elif key in saved:
            value = _value(leaf, saved[key])
        else:
            continue
        section: Any = config
        for name in leaf.path[:-1]:
            section = getattr(section, name)
        setattr(section, leaf.path[-1], value)
    return config


def _value(leaf: Option, text: Any) -> Any:
    """Return a value of `regress.engine.config.flat`, which writes null, lists and empty mappings as JSON."""
    value = text
    if isinstance(text, str) and (leaf.kind is not str or (leaf.optional and text == "null")):
        value = json.loads(text)
    if value is None and leaf.optional:
        return None
    kinds: Any = {int: int, float: (int, float), bool: bool, str: str, list: list}.get(leaf.kind, object)
    if not isinstance(value, kinds) or (isinstance(value, bool) and leaf.kind is not bool):
        raise ValueError(f"{leaf.key} is {text!r}")
    return value
