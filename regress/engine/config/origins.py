"""Where a configuration value came from, as people are told."""

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
    """The layer that won, and which preset, ``path:line``, variable or override of it."""

    layer: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.layer} {self.name}".rstrip()


def absolute(path: Path) -> Path:
    """The path without ``..``, links kept: a linked file inherits from its neighbors where the link is."""
    return Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow links


def shown_path(path: Path) -> str:
    """Relative to the working directory where the file lies below it, absolute elsewhere."""
    path, here = absolute(path), Path.cwd()
    shown = str(path.relative_to(here) if path.is_relative_to(here) else path)
    return shown if shown.isprintable() else repr(shown)
