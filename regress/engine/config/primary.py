"""Primary file of a run: its lookup, and the search path it defines."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from regress.engine.config.files import (
    SUFFIX,
    YamlFile,
    find_yaml,
    names_in,
    read_yaml,
    search_directory,
)
from regress.engine.config.nearest import nearest
from regress.engine.config.origins import absolute, shown_path
from regress.engine.config.resolve import why_unresolved
from regress.engine.config.text import shortened
from regress.errors import ConfigError

BUILT_IN = Path(__file__).parent / "conf"


@dataclass(frozen=True)
class Primary:
    """Primary file, if any, and the directories in which it and all others are looked for, in order."""

    file: YamlFile | None
    directories: tuple[Path, ...]


def find_primary(config_path: str | None, config_name: str | None, searchpath: Any = None) -> Primary:
    """Find the primary file from a directory and a name, or from one file, as the command line gives them.

    ``searchpath`` replaces the file's ``hydra.searchpath``. Built-in configurations come last.

    Raises:
        ConfigError: if path and name contradict each other or name nothing, or the file cannot be read.
    """
    if config_name is None and config_path is None:
        directories, file = [Path.cwd()], None
    else:
        given = absolute(Path(config_path or ".").expanduser())
        path = _locate(given, config_name)
        directories, file = [path.parent, *([given] if given.is_dir() else [])], read_yaml(path)
    if searchpath is None and file is not None:
        searchpath = _own_searchpath(file)
    entries = searchpath if isinstance(searchpath, list) else [] if searchpath is None else [searchpath]
    further = [search_directory(entry) for entry in entries]
    return Primary(file, tuple(dict.fromkeys([*directories, *further, BUILT_IN])))


def _locate(given: Path, config_name: str | None) -> Path:
    """Return the file that the directory or file ``given`` and the name mean. Raises `ConfigError`."""
    stated = f"config_path={shown_path(given)}"
    if config_name is None:
        if given.is_dir():
            names = ", ".join(names_in([given])) or "none here"
            raise ConfigError(f"{stated} is a directory; add config_name (there are: {names}).")
        if given.suffix != SUFFIX or not given.is_file():
            raise ConfigError(f"{stated} is no directory and no {SUFFIX} file; correct the path.")
        return given
    if not given.is_dir():
        what = "a file" if given.is_file() else "missing"
        raise ConfigError(
            f"{stated} is {what}, but config_name={shortened(config_name)} needs a directory; give that."
        )
    path = find_yaml(config_name, [given, BUILT_IN])
    if path is None:
        reason = missing_file(config_name, [given, BUILT_IN])
        raise ConfigError(f"config_name={shortened(config_name)} is no configuration: {reason}.")
    return path


def missing_file(name: str, directories: Sequence[Path]) -> str:
    """Describe the directories searched for ``name`` (``option`` or ``group/option``) and the names found there."""
    group, _, option = name.removesuffix(SUFFIX).rpartition("/")
    existing = [directory / group for directory in directories if (directory / group).is_dir()]
    searched = ", ".join(shown_path(directory) for directory in existing or directories)
    if not existing:
        return f"there is no group {group} in any of the directories {searched}"
    names = names_in(existing)
    instead = f"the nearest name is {nearest(option, names)}" if names else "they hold no YAML files"
    return f"{option}{SUFFIX} is in none of the directories {searched}; {instead}"


def _own_searchpath(file: YamlFile) -> Any:
    """Return ``hydra.searchpath`` of a primary file, resolved; `ConfigError` for any other key of ``hydra``."""
    own = file.values.get("hydra") or {}
    others = [name for name in own if name != "searchpath"] if isinstance(own, dict) else [str(own)]
    if others:
        where = file.where(("hydra", others[0]))
        raise ConfigError(f"hydra.{others[0]} (file {where}) is not used, only searchpath is; remove it.")
    if not own:
        return None
    try:
        resolved: Any = OmegaConf.to_container(OmegaConf.create(file.values)["hydra"], resolve=True)
    except OmegaConfBaseException as error:
        where = file.where(("hydra", "searchpath"))
        raise ConfigError(f"hydra.searchpath (file {where}) {why_unresolved(error)}.") from error
    return resolved.get("searchpath")
