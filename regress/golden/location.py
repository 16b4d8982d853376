"""Location of the golden directory, for commands that were given none."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from regress.errors import GoldenError
from regress.project import project_root

__all__ = ["golden_directory", "project_root"]

if TYPE_CHECKING:
    from regress.golden.store import GoldenStore

DEFAULT = "golden"
INI = "regress_golden_dir"


def golden_directory(start: Path | None = None) -> Path:
    """Return `regress_golden_dir` of the nearest pyproject.toml (as pytest reads it), else `golden/` beside
    that file.

    Raises `GoldenError` when that file is no TOML or names no directory.
    """
    root = project_root(start)
    return Path(DEFAULT) if root is None else _shown(root / _configured(root / "pyproject.toml"))


def open_store(golden_dir: Path | None) -> GoldenStore:
    """Open the golden directory that is given, or the project's; raises `GoldenError` if there is none."""
    from regress.golden.store import GoldenStore  # numpy starts here

    store = GoldenStore(golden_dir or golden_directory())
    if not store.root.is_dir():
        raise GoldenError(
            f"{store.root} is no golden directory: give --golden-dir, or make one with pytest --update-golden or with "
            f"{store.root}/CASE/case.yaml"
        )
    return store


def _configured(path: Path) -> str:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise GoldenError(f"{path} cannot be read ({error}): correct it, or give --golden-dir") from None
    section = tree.get("tool", {}).get("pytest", {})
    for options in (section.get("ini_options", {}), section):
        if INI in options:
            if not isinstance(options[INI], str) or not options[INI]:
                raise GoldenError(f"{INI} = {options[INI]!r} in {path} is no directory: write a path")
            found: str = options[INI]
            return found
    return DEFAULT


def _shown(path: Path) -> Path:
    """Return the path relative to the current directory where it lies below it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
