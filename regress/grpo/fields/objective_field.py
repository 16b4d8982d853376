"""A field of the objective: its default, what it means, and which values it takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from typing import Any


def value(
    default: Any,
    help: str,
    *,
    choices: Iterable[str] = (),
    minimum: float | None = None,
    infinite: bool = False,
) -> Any:
    """Return a dataclass field with its rules in the metadata.

    Args:
        choices: texts that it takes; none: any.
        minimum: least number.
        infinite: True if a number may be infinite.
    """
    metadata: dict[str, Any] = {"help": help}
    if chosen := tuple(choices):
        metadata["choices"] = chosen
    if minimum is not None:
        metadata["minimum"] = minimum
    if infinite:
        metadata["infinite"] = True
    return field(default=default, metadata=metadata)
