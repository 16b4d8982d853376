"""Values as they are written in YAML, for messages and listings."""

import json
from typing import Any

LONGEST = 80


def in_yaml(value: Any) -> str:
    """One line of YAML flow style: ``null``, ``true``, ``[0.9, 0.999]``, plain text unquoted."""
    return value if isinstance(value, str) and value else json.dumps(value, default=str, ensure_ascii=False)


def shortened(value: Any) -> str:
    """`in_yaml`, cut to fit a sentence."""
    text = in_yaml(value).replace("\n", "\\n")
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."
