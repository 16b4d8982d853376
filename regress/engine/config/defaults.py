"""The file layer: which files make up a configuration, by Hydra's defaults lists, and what each says."""

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.default_element import ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from regress.engine.config.files import BUILT_IN, YamlFile, file_errors, find_yaml, missing_yaml, read_yaml
from regress.engine.config.files import search_directory, with_suffix
from regress.engine.config.leaves import KeyPath, find_leaf, holds_text, leaves
from regress.engine.config.origins import COMMAND_LINE, FILE, Origin, shown_path
from regress.engine.config.store import Entry, Store
from regress.errors import ConfigError


@dataclass(frozen=True)
class Primary:
    """The file a run names, by directory and name without suffix; no name means no file of one's own."""

    directory: Path
    name: str | None


def locate(config_path: str | None, config_name: str | None) -> Primary:
    """The primary file from what the command line gives: a directory and a name, or one file.

    Raises `ConfigError` if they contradict each other or name nothing.
    """
    if config_path is None:
        return Primary(Path.cwd(), config_name)
    path = Path(config_path).expanduser()
    if path.is_dir():
        if config_name is None:
            names = ", ".join(sorted(file.stem for file in path.glob("*.yaml"))) or "none"
            raise ConfigError(f"config_path={config_path} is a directory; add config_name, one of: {names}.")
        return Primary(path.absolute(), config_name)
    if config_name is not None:
        rule = "is a file, and" if path.is_file() else "is no directory, so"
        raise ConfigError(f"config_path={config_path} {rule} config_name={config_name} cannot be found in it; give a directory.")
    if path.suffix != ".yaml" or not path.is_file():
        raise ConfigError(f"config_path={config_path} is no directory and no .yaml file; correct the path.")
    return Primary(path.parent.absolute(), path.stem)


class FileLayer:
    """Files that make up a configuration, on a search path: own directory, ``hydra.searchpath``, built-in ones."""

    def __init__(self, primary: Primary, searchpath: Any = None) -> None:
        """``searchpath`` replaces the primary file's ``hydra.searchpath``. Raises `ConfigError`."""
        self._file = _read_primary(primary)
        if searchpath is None and self._file is not None:
            searchpath = _own_searchpath(self._file)
        further = [search_directory(entry).absolute() for entry in _as_list(searchpath)]
        # Hydra looks for the primary file in the first directory only
        first = [self._file.path.parent] if self._file is not None else []
        self._directories = list(dict.fromkeys([*first, primary.directory, *further, BUILT_IN]))
        self._name = self._file.path.stem if self._file is not None else None

    def is_group(self, name: str) -> bool:
        """Whether overriding ``name`` chooses a file: a directory of that name exists, and no plain value."""
        return name not in leaves() and any((directory / name).is_dir() for directory in self._directories)

    def apply(self, choices: Sequence[Override], store: Store) -> None:
        """Lay all files over the store, in the order of the defaults lists, with the chosen groups."""
        if self._name is None and not choices:
            return
        chosen = {override.key_or_group: str(override.input_line) for override in choices}
        for default in self._defaults(choices):
            for entry in self._entries(default, chosen):
                store.put(entry)

    def _defaults(self, choices: Sequence[Override]) -> list[ResultDefault]:
        further = json.dumps([f"file://{directory}" for directory in self._directories[1:]])
        searchpath = f"hydra.searchpath={further}"
        with self._errors(), _loader(self._directories[0]) as loader:
            lists = loader.compute_defaults_list(self._name, [searchpath], RunMode.RUN)
            if choices:
                known = lists.overrides.known_choices
                lines = [searchpath, *(_choice(override, known) for override in choices)]
                lists = loader.compute_defaults_list(self._name, lines, RunMode.RUN)
        return [default for default in lists.defaults if _is_ours(default)]

    def _entries(self, default: ResultDefault, chosen: dict[str, str]) -> Iterator[Entry]:
        path = find_yaml(str(default.config_path), self._directories)
        assert path is not None  # Hydra has just read it from there
        file = read_yaml(path)
        package = tuple(default.package.split(".")) if default.package else ()
        override = chosen.get(str(default.override_key).partition("@")[0])
        for key, value in _leaves(file.values):
            if key[0] not in ("defaults", "hydra"):
                layer = Origin(FILE, file.where(key))
                if override is not None:
                    layer = Origin(COMMAND_LINE, f"{override} ({file.where(key)})")
                yield Entry((*package, *key), _as_written(file, key, (*package, *key), value, layer), layer)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        path = self._file.path if self._file is not None else self._directories[0]
        try:
            with file_errors(path), self._missing_errors(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a defaults list without _self_ means what Hydra 1.1 made of it
                yield
        except RecursionError as error:
            raise ConfigError(f"File {shown_path(path)} inherits from itself; break the circle of defaults lists.") from error
        except (HydraException, OmegaConfBaseException, ValueError, TypeError, AttributeError, AssertionError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ConfigError(f"File {shown_path(path)} has a defaults list that cannot be composed ({reason}); correct it.") from error

    @contextmanager
    def _missing_errors(self) -> Iterator[None]:
        try:
            yield
        except MissingConfigException as error:
            raise ConfigError(self._missing(error)) from error

    def _missing(self, error: MissingConfigException) -> str:
        name = str(error.missing_cfg_file)
        group, _, option = name.rpartition("/")
        directories = [directory / group for directory in self._directories]
        reason = missing_yaml(option, [directory for directory in directories if directory.is_dir()] or directories)
        parent = str(error).partition("'")[2].partition("'")[0] if str(error).startswith("In ") else None
        return reason if parent is None else f"The defaults list of {parent} names {name}: {reason}"


def _read_primary(primary: Primary) -> YamlFile | None:
    if primary.name is None:
        return None
    path = find_yaml(primary.name, [primary.directory, BUILT_IN])
    if path is None:
        raise ConfigError(missing_yaml(primary.name, [primary.directory, BUILT_IN]))
    return read_yaml(path)


@contextmanager
def _loader(directory: Path) -> Iterator[ConfigLoader]:
    """Hydra's loader for a directory, whether or not this process already runs under Hydra."""
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(directory), job_name="regress", version_base=None):
            yield GlobalHydra.instance().config_loader()
    finally:
        GlobalHydra.instance().hydra = outer


def _choice(override: Override, known: dict[str, str | None]) -> str:
    """The line that makes Hydra take the choice, whether or not the group is in a defaults list already."""
    line = str(override.input_line).lstrip("+")
    if override.is_delete() or override.get_key_element().lstrip("+") in known:
        return line
    return f"+{line}"


def _is_ours(default: ResultDefault) -> bool:
    path = default.config_path
    return path is not None and path.partition("/")[0] not in ("hydra", "_dummy_empty_config_")


def _as_written(file: YamlFile, key: KeyPath, path: KeyPath, value: Any, origin: Origin) -> Any:
    """The value; for a key that holds text, numbers and booleans exactly as the file spells them."""
    if isinstance(value, bool | int | float) and holds_text(find_leaf(path, value, origin)):
        written = file.written.get(key)
        return written.text if written is not None else value
    return value


def _leaves(values: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Values below nested mappings; an empty mapping, and one with keys that are no text, is a value."""
    for key, value in values.items():
        if isinstance(value, dict) and value and all(isinstance(name, str) for name in value):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, str(key)), value


def _own_searchpath(file: YamlFile) -> Any:
    """``hydra.searchpath`` of a primary file, resolved; `ConfigError` for any other key of ``hydra``."""
    own = file.values.get("hydra") or {}
    others = [name for name in own if name != "searchpath"] if isinstance(own, dict) else [str(own)]
    if others:
        where = file.where(("hydra", others[0]))
        raise ConfigError(f"hydra.{others[0]} ({where}) has no meaning here, only hydra.searchpath has; remove it.")
    try:
        return OmegaConf.to_container(OmegaConf.create(own), resolve=True).get("searchpath")  # type: ignore[union-attr]
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"hydra.searchpath ({file.where(('hydra',))}) cannot be resolved ({reason}).") from error


def _as_list(searchpath: Any) -> list[Any]:
    if searchpath is None:
        return []
    return searchpath if isinstance(searchpath, list) else [searchpath]
