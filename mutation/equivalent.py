"""Mutants that compute the same, with the reason: no check can kill them."""

from __future__ import annotations

import tomllib
from pathlib import Path

FILE = Path(__file__).with_name("equivalent.toml")


def equivalents(path: Path = FILE) -> dict[str, str]:
    """Return the reason of each mutant that is argued to be equivalent, by its name."""
    return dict(tomllib.loads(path.read_text(encoding="utf-8")))
