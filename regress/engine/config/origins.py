"""Where a configuration value came from, as people are told."""

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


def shown_path(path: Path) -> str:
    """Relative to the working directory where the file lies below it, absolute elsewhere."""
    absolute, here = path.absolute(), Path.cwd()
    return str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute)
