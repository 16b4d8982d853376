"""Location of the golden directory, for commands that were given none."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regress.errors import ConfigError, GoldenError
from regress.project import project_root, project_tree

__all__ = ["golden_directory", "project_root"]

if TYPE_CHECKING:
    from regress.golden.store import GoldenStore

DEFAULT = "golden"
INI = "regress_golden_dir"
GROUP = "regress.cases"
"""Entry points of distributions that hold golden cases; each names the package whose folder they are in."""


def golden_directory(start: Path | None = None) -> Path:
    """Return `regress_golden_dir` of the nearest pyproject.toml (as pytest reads it), else `golden/` beside
    that file; where there is no such directory, that of an installed distribution of golden cases.

    Raises `GoldenError` when that file is no TOML or names no directory, or when several distributions hold cases.
    """
    root = project_root(start)
    found = Path(DEFAULT) if root is None else _shown(root / _configured(root / "pyproject.toml"))
    return found if found.is_dir() else installed_cases() or found


def installed_cases() -> Path | None:
    """Return the directory of the golden cases that an installed distribution holds.

    Raises `GoldenError` when there are several, or when the package of one is missing.
    """
    offers = {entry.value: entry for entry in entry_points(group=GROUP)}
    if not offers:
        return None
    if len(offers) > 1:
        raise GoldenError(
            f"the packages {', '.join(sorted(offers))} all hold golden cases: choose one with --golden-dir"
        )
    (package,) = offers
    spec = find_spec(package)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    if not folders:
        raise GoldenError(
            f"the package {package} of golden cases is installed without its files: install it again"
        )
    return Path(folders[0])


def open_store(golden_dir: Path | None, *, writes: bool = False) -> GoldenStore:
    """Open the golden directory that is given, or the project's, or that of installed cases to read them.

    Raises `GoldenError` if there is none, or if installed cases would be written.
    """
    from regress.golden.store import GoldenStore  # numpy starts here

    root = golden_dir or golden_directory()
    if writes and golden_dir is None and root == installed_cases():
        raise GoldenError(
            f"{root} holds cases that were installed and are only read: copy the case to {DEFAULT}/ in your project, "
            "or give --golden-dir"
        )
    store = GoldenStore(root)
    if not store.root.is_dir():
        raise GoldenError(
            f"{store.root} is no golden directory: give --golden-dir, or make one with pytest --update-golden or with "
            f"{store.root}/CASE/case.yaml"
        )
    return store


def _configured(path: Path) -> str:
    try:
        tree = project_tree(path)
    except ConfigError as error:
        raise GoldenError(f"{error}, or give --golden-dir") from None
    section = _table(_table(tree, "tool"), "pytest")
    for options in (_table(section, "ini_options"), section):
        if INI in options:
            if not isinstance(options[INI], str) or not options[INI]:
                raise GoldenError(f"{INI} = {options[INI]!r} in {path} is no directory: write a path")
            found: str = options[INI]
            return found
    return DEFAULT


def _table(tree: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a table of a document; an empty one for anything else of that name, which is not ours to judge."""
    found = tree.get(key)
    return found if isinstance(found, Mapping) else {}


def _shown(path: Path) -> Path:
    """Return the path relative to the current directory where it lies below it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
