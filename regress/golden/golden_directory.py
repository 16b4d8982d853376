"""Golden directory: one folder for each case; and where it is, for commands that were given none."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regress.errors import ConfigError, GoldenError, meant
from regress.golden.golden_files import CASE_FILE, MANIFEST, check_case_name, finish_update
from regress.golden.hub_goldens import PREFIX, hub_directory, refuse_writing
from regress.project_settings import project_root, project_tree

if TYPE_CHECKING:
    from regress.golden.golden_case import GoldenCase

__all__ = ["GoldenStore", "golden_directory", "open_store", "project_root"]

DEFAULT = "golden"
INI = "regress_golden_dir"
GROUP = "regress.cases"
"""Entry points of distributions that hold golden cases; each names the package whose folder they are in."""


class GoldenStore:
    """All cases under `root`, which need not exist yet; opening it finishes an update that was interrupted."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        finish_update(self.root)

    def names(self) -> list[str]:
        """Return the names of the cases, recorded or not: folders that hold a `case.yaml` or a manifest."""
        found = (path.parent for file in (CASE_FILE, MANIFEST) for path in self.root.glob(f"*/{file}"))
        return sorted({folder.name for folder in found if not folder.name.startswith(".")})

    def folder(self, name: str) -> Path:
        """Return the folder of a case, existing or not; raises `GoldenError` for a name such as `../x`."""
        return self.root / check_case_name(name)

    def case(self, name: str, *, allow_changed_inputs: bool = False) -> GoldenCase:
        """Open a case; see `GoldenCase`. Raises `GoldenError` naming the path when it is missing or damaged."""
        from regress.golden.golden_case import GoldenCase  # numpy starts here

        folder = self.folder(name)
        if not folder.is_dir():
            names = self.names()
            raise GoldenError(f"""{folder} does not exist, so there is no case {name!r}: {meant(name, names)}cases here
            are {", ".join(names) or "none"}""")
        return GoldenCase(folder, allow_changed_inputs=allow_changed_inputs)


def golden_directory(start: Path | None = None) -> Path:
    """Return `regress_golden_dir` of the nearest pyproject.toml (as pytest reads it), else `golden/` beside
    that file; where there is no such directory, that of an installed distribution of golden cases. An address on the
    hub is that of its cache, see `hub_directory`.

    Raises `GoldenError` if that file is not valid TOML or names no directory, or several distributions hold cases.
    """
    root = project_root(start)
    configured = DEFAULT if root is None else _configured(root / "pyproject.toml")
    if configured.startswith(PREFIX):
        return hub_directory(configured)
    found = Path(DEFAULT) if root is None else _shown(root / configured)
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
    root = golden_dir or golden_directory()
    if writes and golden_dir is None and root == installed_cases():
        raise GoldenError(f"""{root} holds cases that were installed and are only read: copy the case to {DEFAULT}/ in
        your project, or give --golden-dir""")
    if writes:
        refuse_writing(root)
    store = GoldenStore(root)
    if not store.root.is_dir():
        raise GoldenError(f"""{store.root} is not a golden directory: give --golden-dir, or make one with pytest
        --update-golden or with {store.root}/CASE/case.yaml""")
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
                raise GoldenError(f"{INI} = {options[INI]!r} in {path} is not a directory: write a path")
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
