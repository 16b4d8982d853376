"""The file that a run names: which one it is, and the search path that it brings along."""

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
    not_found,
    read_yaml,
    search_directory,
)
from regress.errors import ConfigError

BUILT_IN = Path(__file__).parent / "conf"


@dataclass(frozen=True)
class Primary:
    """The primary file, if any, and the directories in which it and all others are looked for, in order."""

    file: YamlFile | None
    directories: tuple[Path, ...]


def find_primary(config_path: str | None, config_name: str | None, searchpath: Any = None) -> Primary:
    """The primary file from what the command line gives: a directory and a name, or one file.

    ``searchpath`` replaces the file's ``hydra.searchpath``. Built-in configurations come last.

    Raises:
        ConfigError: if path and name contradict each other or name nothing, or the file cannot be read.
    """
    if config_name is None and config_path is None:
        directories, file = [Path.cwd()], None
    else:
        path = _locate(config_path, config_name)
        home = Path(config_path or ".").absolute()
        directories, file = [path.parent, *([home] if home.is_dir() else [])], read_yaml(path)
    if searchpath is None and file is not None:
        searchpath = _own_searchpath(file)
    entries = searchpath if isinstance(searchpath, list) else [] if searchpath is None else [searchpath]
    further = [search_directory(entry) for entry in entries]
    return Primary(file, tuple(dict.fromkeys([*directories, *further, BUILT_IN])))


def _locate(config_path: str | None, config_name: str | None) -> Path:
    given = Path(config_path or ".").expanduser().absolute()
    if config_name is None:
        if given.is_dir():
            names = ", ".join(names_in([given])) or "none"
            raise ConfigError(f"config_path={config_path} is a directory; add config_name, one of {names}.")
        if given.suffix != SUFFIX or not given.is_file():
            raise ConfigError(f"config_path={config_path} is no directory and no {SUFFIX} file; correct it.")
        return given
    if not given.is_dir():
        what = "a file itself" if given.is_file() else "no directory"
        raise ConfigError(
            f"config_path={config_path} is {what}, in which config_name={config_name} cannot be; "
            "give the directory of that file."
        )
    path = find_yaml(config_name, [given, BUILT_IN])
    if path is None:
        raise ConfigError(f"config_name={config_name}: {not_found(config_name, [given, BUILT_IN])}.")
    return path


def _own_searchpath(file: YamlFile) -> Any:
    """``hydra.searchpath`` of a primary file, resolved; `ConfigError` for any other key of ``hydra``."""
    own = file.values.get("hydra") or {}
    others = [name for name in own if name != "searchpath"] if isinstance(own, dict) else [str(own)]
    if others:
        where = file.where(("hydra", others[0]))
        raise ConfigError(
            f"hydra.{others[0]} ({where}) has no meaning here, only hydra.searchpath has; remove it."
        )
    try:
        resolved: Any = OmegaConf.to_container(OmegaConf.create(own), resolve=True)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        where = file.where(("hydra", "searchpath"))
        raise ConfigError(f"hydra.searchpath ({where}) cannot be resolved ({reason}); correct it.") from error
    return resolved.get("searchpath")
