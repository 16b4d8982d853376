"""Origins of configuration values, as shown to people."""

import os
from dataclasses import dataclass
from pathlib import Path

DEFAULT = "default"
PRESET = "preset"
FILE = "file"
ENVIRONMENT = "environment"
COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Origin:
    """Layer that won, and its preset, ``path:line``, variable or override."""

    layer: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.layer} {self.name}".rstrip()


def author(origin: Origin) -> str:
    """Return the file without its line, or the layer."""
    return str(origin).rpartition(":")[0] if origin.layer == FILE else origin.layer


def absolute(path: Path) -> Path:
    """Return the path without ``..``, links kept: a linked file inherits from its neighbors where the link is."""
    return Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow links


def shown_path(path: Path) -> str:
    """Return the path relative to the working directory if the file lies below it, else absolute."""
    path, here = absolute(path), Path.cwd()
    shown = str(path.relative_to(here) if path.is_relative_to(here) else path)
    return shown if shown.isprintable() else repr(shown)
