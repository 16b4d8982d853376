"""Values written as YAML, for messages and listings."""

import json
import math
from typing import Any

import yaml

LONGEST = 80
END_OF_SCALAR = "\n..."


def in_yaml(value: Any) -> str:
    """Return one line of YAML that reads back as ``value``: ``null``, ``true``, ``[0.9, 0.999]``, ``'007'``."""
    if isinstance(value, str) and not value.isprintable():
        return json.dumps(value)
    dumped: str = yaml.safe_dump(
        value, default_flow_style=True, sort_keys=False, width=math.inf, allow_unicode=True
    )
    return dumped.rstrip("\n").removesuffix(END_OF_SCALAR)


def first_line(error: BaseException) -> str:
    """Return the first line of another library's exception."""
    return (str(error) or type(error).__name__).splitlines()[0]


def shortened(value: Any) -> str:
    """Return a value for a sentence: text as it is, anything else in YAML, cut when long."""
    plain = isinstance(value, str) and value.isprintable() and value.strip() != ""
    text = value if plain else in_yaml(value)
    text = text if text.isprintable() else repr(value)
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."
