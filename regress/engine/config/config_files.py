"""YAML files of the configuration: looked up on the search path, read with the line of each value, composed by Hydra.

Hydra interprets the defaults lists; the files are read here, so that errors name the file that is broken.
"""

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import MissingConfigException
from hydra.plugins.config_source import ConfigResult
from omegaconf import OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException

from regress.engine.config.config_messages import (
    COMMAND_LINE,
    FILE,
    Origin,
    absolute,
    first_line,
    nearest,
    shortened,
    shown_path,
)
from regress.engine.config.config_option import Entry, KeyPath
from regress.engine.config.config_values import Resolver, UnresolvedError, is_tree
from regress.errors import ConfigError
from regress.untrusted_files import read_bytes

SUFFIX = ".yaml"
BUILT_IN = Path(__file__).parent / "conf"
LIMIT = 1 << 24
"""Most bytes of a file."""
LARGEST = 200_000
"""Most values of a file, those of aliases counted each time."""
CONTROL = ("defaults", "hydra")
"""Top-level keys of a file that control composition."""
NO_FILE = "_dummy_empty_config_"
"""Hydra's name of the primary file where there is none."""
UNREADABLE = (yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError, AttributeError)
"""Exceptions that PyYAML and OmegaConf raise for text that they cannot convert."""


@dataclass(frozen=True)
class YamlFile:
    """Values of one file, interpolations unresolved, with the line and the source text of each key."""

    path: Path
    text: str
    values: dict[str, Any]
    written: Mapping[KeyPath, tuple[int, str | None]]

    def where(self, key: KeyPath) -> str:
        """Return ``path:line`` of a key, or of the nearest key above it that the file spells out."""
        known = (key[:depth] for depth in range(len(key), 0, -1) if key[:depth] in self.written)
        return ":".join([shown_path(self.path), *(str(self.written[one][0]) for one in [*known][:1])])

    def entries(self, package: KeyPath, chosen: str | None) -> Iterator[Entry]:
        """Yield what the file gives below a package; ``chosen``: the override that chose it."""
        for key, value in _leaves(self.values):
            where = self.where(key)
            origin = Origin(FILE, where) if chosen is None else Origin(COMMAND_LINE, f"{chosen} ({where})")
            yield Entry((*package, *key), value, origin, self.written.get(key, (0, None))[1])


def read_yaml(path: Path) -> YamlFile:
    """Read a YAML file. Raises `ConfigError` naming file, line and remedy unless it is UTF-8 with one mapping."""
    with _read_errors(path):
        text = read_bytes(path, LIMIT).decode("utf-8")
        loader = get_yaml_loader()(text)
        node = loader.get_single_node()
        _refuse_growth(node)
        if node is None:
            return YamlFile(path, text, {}, {})
        if not isinstance(node, yaml.MappingNode):
            where = f"{shown_path(path)}:{node.start_mark.line + 1}"
            raise ConfigError(f"File {where} must hold a mapping; write lines of KEY: VALUE.")
        values = loader.construct_document(node)
        _refuse_keys(values)
        return YamlFile(path, text, values, dict(_written(node, ())))


@contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    """Turn errors of reading ``path`` into `ConfigError`."""
    shown = shown_path(path)
    try:
        yield
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        raise ConfigError(f"File {shown}{line} is not valid YAML ({error.problem}); correct it.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"File {shown} is not text but binary data; give a YAML file.") from error
    except RecursionError as error:
        raise ConfigError(f"File {shown} is nested too deeply; it is not a configuration.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"File {shown} is not UTF-8 text; save it as UTF-8.") from error
    except UNREADABLE as error:
        words = f"holds what YAML cannot read ({first_line(error)}); correct it."
        raise ConfigError(f"File {shown} {words}") from error
    except OSError as error:
        raise ConfigError(f"File {shown} cannot be read ({error.strerror}); check permissions.") from error


def _refuse_growth(node: yaml.Node | None) -> None:
    """Raise `ValueError` for aliases of aliases, which a few lines multiply to more values than memory holds."""
    sizes: dict[int, int] = {}

    def size(one: Any) -> int:
        if id(one) not in sizes:
            sizes[id(one)] = LARGEST + 1  # of what holds itself
            parts = one.value if isinstance(one, yaml.CollectionNode) else ()
            below = [part for pair in parts for part in (pair if isinstance(pair, tuple) else (pair,))]
            sizes[id(one)] = 1 + sum(map(size, below))
        return sizes[id(one)]

    if node is not None and size(node) > LARGEST:
        raise ValueError(f"its aliases make more than {LARGEST} values of it")


def _refuse_keys(value: Any) -> None:
    for name, member in value.items() if isinstance(value, dict) else ():
        if name is None or isinstance(name, tuple):
            raise ValueError(f"Incompatible key type '{type(name).__name__}'")
        _refuse_keys(member)


def _written(node: yaml.Node, path: KeyPath) -> Iterator[tuple[KeyPath, tuple[int, str | None]]]:
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        below = (*path, str(key.value))
        yield below, (key.start_mark.line + 1, value.value if isinstance(value, yaml.ScalarNode) else None)
        yield from _written(value, below)


def _leaves(mapping: Mapping[str, Any], path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    for name, value in mapping.items():
        if path or name not in CONTROL:
            below = (*path, str(name))
            yield from _leaves(value, below) if is_tree(value) else [(below, value)]


class Files(ConfigRepository):
    """The files of a search path as Hydra looks them up, each read once.

    Args:
        config_path: a directory, or the primary file itself; None for the working directory.
        config_name: a file there or a built-in one; None for no file.
        searchpath: replaces ``hydra.searchpath`` of the primary file.

    Raises:
        ConfigError: if path and name contradict each other or name nothing, or the file cannot be read.
    """

    def __init__(
        self, config_path: str | None, config_name: str | None, searchpath: Any, environ: Mapping[str, str]
    ) -> None:
        self._read: dict[Path, YamlFile] = {}
        self._asked: list[Path] = []
        self.primary: YamlFile | None = None
        first = [Path.cwd()]
        if config_name is not None or config_path is not None:
            given = absolute(Path(config_path or ".").expanduser())
            path = _located(given, config_name)
            self.primary = self._read[path] = read_yaml(path)
            first = [path.parent, *([given] if given.is_dir() else [])]
            searchpath = _own_searchpath(self.primary, environ) if searchpath is None else searchpath
        entries = searchpath if isinstance(searchpath, list) else [] if searchpath is None else [searchpath]
        self.directories = tuple(dict.fromkeys([*first, *map(_search_directory, entries), BUILT_IN]))
        self.sources = [FileConfigSource("regress", f"file://{directory}") for directory in self.directories]

    def is_group(self, name: str) -> bool:
        """Return True if a directory of that name is on the search path."""
        return any((directory / name).is_dir() for directory in self.directories)

    def file(self, name: str) -> YamlFile | None:
        """Return the file of that name (``group/option``) on the search path, or None."""
        path = _found(name, self.directories)
        if path is not None and path not in self._read:
            self._read[path] = read_yaml(path)
        return self._read[path] if path is not None else None

    def config_exists(self, config_path: str) -> bool:
        """Return True for a file on the search path, and for the empty one in place of a primary file."""
        return config_path == NO_FILE or self.file(config_path) is not None

    def load_config(self, config_path: str) -> ConfigResult | None:
        """Return the defaults list and the header of a file; Hydra asks for it, top down."""
        file = self.file(config_path)
        if file is None and config_path != NO_FILE:
            return None
        values: dict[str, Any] = {}
        header: dict[str, str | None] = {"package": None}
        if file is not None:
            self._asked += [file.path] if self._asked[-1:] != [file.path] else []  # twice in a row
            values = {"defaults": file.values.get("defaults", [])}
            # of the others Hydra only asks whether there are some
            values |= {"content": True} if file.values.keys() - {"defaults"} else {}
            header = FileConfigSource._get_header_dict(file.text[:512])
        config = OmegaConf.create(values)
        lists = self._create_defaults_list(config_path, self._extract_defaults_list(config_path, config))
        return ConfigResult("regress", config_path, config, header, lists)

    def entries(self, choices: Sequence[Override]) -> Iterator[Entry]:
        """Yield what the primary file, its defaults lists and the chosen groups give, in their order."""
        chosen = {choice.key_or_group: str(choice.input_line) for choice in choices}
        for default in self._defaults(choices):
            file = self.file(str(default.config_path))
            if file is not None:
                package = tuple(default.package.split(".")) if default.package else ()
                yield from file.entries(package, chosen.get(str(default.override_key).partition("@")[0]))

    def _defaults(self, choices: Sequence[Override]) -> list[ResultDefault]:
        """Return the flat list that Hydra makes of all defaults lists."""
        name = self.primary.path.stem if self.primary is not None else None
        with self._list_errors(choices), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # without _self_ a file comes after its defaults list
            lists = create_defaults_list(self, name, [], prepend_hydra=False, skip_missing=False)
            if choices:
                known = lists.overrides.known_choices
                lines = [_choice(override, known) for override in choices]
                lists = create_defaults_list(self, name, lines, prepend_hydra=False, skip_missing=False)
        return lists.defaults

    @contextmanager
    def _list_errors(self, choices: Sequence[Override]) -> Iterator[None]:
        """Turn errors of composition into `ConfigError`."""
        shown = shown_path(self.primary.path) if self.primary is not None else COMMAND_LINE
        try:
            yield
        except MissingConfigException as error:
            name, parent = str(error.missing_cfg_file), re.match("In '([^']*)'", str(error))
            file = self.file(parent[1]) if parent is not None else None
            where = f"file {file.where(('defaults',))}" if file is not None else shown
            where = (
                COMMAND_LINE if name in (f"{one.key_or_group}/{one.value()}" for one in choices) else where
            )
            reason = _missing_file(name, self.directories)
            raise ConfigError(f"{shortened(name)} ({where}) is not a configuration: {reason}.") from error
        except RecursionError as error:
            circle = " -> ".join(map(shown_path, _circle(self._asked)))
            words = "take one of them out of a defaults list."
            raise ConfigError(f"Files inherit in a circle, {circle}; {words}") from error
        except ConfigError:
            raise
        except Exception as error:  # a defaults list can make Hydra raise nearly anything
            words = f"cannot be composed ({first_line(error)}); correct them."
            raise ConfigError(f"The defaults lists of {shown} {words}") from error


def _choice(override: Override, known: Mapping[str, str | None]) -> Override:
    """Return the override as Hydra accepts it, whether or not a defaults list names the group."""
    line = str(override.input_line).lstrip("+")
    is_known = override.get_key_element().lstrip("+~") in known
    if override.is_delete() and not is_known:
        raise ConfigError(f"Override {line} (command line) deletes a group that is not chosen; remove it.")
    return OverridesParser.create().parse_override(line if is_known else f"+{line}")


def _circle(asked: Sequence[Path]) -> list[Path]:
    """Return one turn of the circle that the last files that were asked for go round in."""
    again = len(asked) - 2 - asked[-2::-1].index(asked[-1])
    turn = asked[again + 1 :]
    first = turn.index(min(turn, key=asked.index))
    return [*turn[first:], *turn[: first + 1]]


def _located(given: Path, config_name: str | None) -> Path:
    """Return the file that the directory or file ``given`` and the name mean. Raises `ConfigError`."""
    stated = f"config_path={shown_path(given)}"
    if config_name is None:
        if given.is_dir():
            names = ", ".join(_names_in([given])) or "none here"
            raise ConfigError(f"{stated} is a directory; add config_name (there are: {names}).")
        if given.suffix != SUFFIX or not given.is_file():
            raise ConfigError(f"{stated} is not a directory and no {SUFFIX} file; correct the path.")
        return given
    if not given.is_dir():
        what = "a file" if given.is_file() else "missing"
        words = f"but config_name={shortened(config_name)} needs a directory; give that."
        raise ConfigError(f"{stated} is {what}, {words}")
    path = _found(config_name, [given, BUILT_IN])
    if path is None:
        reason = _missing_file(config_name, [given, BUILT_IN])
        raise ConfigError(f"config_name={shortened(config_name)} is not a configuration: {reason}.")
    return path


def _found(name: str, directories: Sequence[Path]) -> Path | None:
    """Return the first file of that name (with or without suffix) on the search path, or None."""
    file = f"{name.removesuffix(SUFFIX)}{SUFFIX}"
    candidates = (absolute(directory / file) for directory in directories)
    return next((path for path in candidates if path.is_file()), None)


def _names_in(directories: Sequence[Path]) -> list[str]:
    found = (path for directory in directories for path in directory.glob(f"*{SUFFIX}"))
    return sorted({path.stem for path in found if path.is_file()})


def _missing_file(name: str, directories: Sequence[Path]) -> str:
    """Describe the directories searched for ``name`` (``option`` or ``group/option``) and the names found there."""
    group, _, option = name.removesuffix(SUFFIX).rpartition("/")
    existing = [directory / group for directory in directories if (directory / group).is_dir()]
    searched = ", ".join(shown_path(directory) for directory in existing or directories)
    if not existing:
        return f"there is no group {group} in any of the directories {searched}"
    names = _names_in(existing)
    instead = f"the nearest name is {nearest(option, names)}" if names else "they hold no YAML files"
    return f"{shortened(option)}{SUFFIX} is in none of the directories {searched}; {instead}"


def _own_searchpath(file: YamlFile, environ: Mapping[str, str]) -> Any:
    """Return ``hydra.searchpath`` of a primary file, resolved; `ConfigError` for any other key of ``hydra``."""
    own = file.values.get("hydra") or {}
    others = [name for name in own if name != "searchpath"] if isinstance(own, dict) else [str(own)]
    if others:
        where = file.where(("hydra", others[0]))
        raise ConfigError(f"hydra.{others[0]} (file {where}) is not used, only searchpath is; remove it.")

    def lookup(path: KeyPath) -> Any:
        value: Any = file.values
        for name in path:
            value = value[name]
        return value

    try:
        return Resolver(lookup, environ).resolved(("hydra", "searchpath")) if own else None
    except UnresolvedError as error:
        where = file.where(("hydra", "searchpath"))
        raise ConfigError(f"hydra.searchpath (file {where}) {error}.") from error


def _search_directory(entry: Any) -> Path:
    """Return the directory that an entry of ``hydra.searchpath`` names.

    As in Hydra: ``file://`` or nothing before a path relative to the working directory. Raises `ConfigError` if
    there is no such directory.
    """
    stated = f"hydra.searchpath={shortened(entry)}"
    if not isinstance(entry, str):
        raise ConfigError(f"{stated} must be a list of directories such as [file://./configs].")
    scheme, _, directory = entry.rpartition("://")
    if scheme not in ("", "file"):
        raise ConfigError(f"{stated} has an unknown scheme; write file://DIRECTORY.")
    if not Path(directory).is_dir():
        raise ConfigError(f"{stated} is not a directory, seen from {Path.cwd()}; correct the path.")
    return absolute(Path(directory))
