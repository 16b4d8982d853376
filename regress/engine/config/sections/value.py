"""Fields of the configuration: a default, its help text and the rules of its value."""

from dataclasses import field
from typing import Any

DUMP_FORMATS = ("safetensors", "pt", "jsonl")


def value(default: Any, help: str, **rules: Any) -> Any:
    """Return a field with its help text and the rules of its value."""
    return field(default=default, metadata={"help": help, **rules})
