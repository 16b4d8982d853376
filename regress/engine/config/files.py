"""YAML files of the configuration: reading, and lookup on the search path."""

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from regress.engine.config.leaves import KeyPath
from regress.engine.config.origins import absolute, shown_path
from regress.engine.config.text import first_line, shortened
from regress.errors import ConfigError
from regress.inputs import read_bytes

SUFFIX = ".yaml"
LIMIT = 1 << 24
"""Most bytes of a file."""
LARGEST = 200_000
"""Most values of a file, those of aliases counted each time."""
INTERPOLATIONS = "${KEY} or ${oc.env:NAME,DEFAULT}"

UNREADABLE = (yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError, AttributeError)
"""Exceptions that PyYAML and OmegaConf raise for text that they cannot convert."""


@dataclass(frozen=True)
class Written:
    """Line of a key in its file (from 1), and the source text of its value if that is a scalar."""

    line: int
    text: str | None


@dataclass(frozen=True)
class YamlFile:
    """Keys of one file, interpolations unresolved, and the line of each."""

    path: Path
    values: dict[str, Any]
    written: Mapping[KeyPath, Written]

    def where(self, key: KeyPath) -> str:
        """Return ``path:line`` of a key, or of the nearest key above it that the file spells out."""
        for depth in range(len(key), 0, -1):
            if key[:depth] in self.written:
                return f"{shown_path(self.path)}:{self.written[key[:depth]].line}"
        return shown_path(self.path)


def read_yaml(path: Path) -> YamlFile:
    """Read a YAML file. Raises `ConfigError` naming file, line and remedy unless it is UTF-8 with one mapping."""
    with _errors(path):
        text = read_bytes(path, LIMIT).decode("utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        _refuse_growth(node)
        if node is not None and not isinstance(node, yaml.MappingNode):
            where = f"{shown_path(path)}:{node.start_mark.line + 1}"
            raise ConfigError(f"File {where} must hold a mapping; write lines of KEY: VALUE.")
        written = dict(_written(node, ()))
        try:
            values: Any = OmegaConf.to_container(OmegaConf.load(StringIO(text)), resolve=False)
        except GrammarParseError as error:
            key = str(error.full_key)
            where = YamlFile(path, {}, written).where(tuple(key.split(".")))
            raise ConfigError(
                f"{key} (file {where}) is a malformed interpolation ({first_line(error)}); "
                f"write {INTERPOLATIONS}."
            ) from error
    return YamlFile(path, values, written)


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    """Turn errors of reading ``path`` into `ConfigError`."""
    shown = shown_path(path)
    try:
        yield
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        raise ConfigError(f"File {shown}{line} is no valid YAML ({error.problem}); correct it.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"File {shown} is no text but binary data; give a YAML file.") from error
    except RecursionError as error:
        raise ConfigError(f"File {shown} is nested too deeply; it is no configuration.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"File {shown} is not UTF-8 text; save it as UTF-8.") from error
    except UNREADABLE as error:
        raise ConfigError(
            f"File {shown} holds what YAML cannot read ({first_line(error)}); correct it."
        ) from error
    except OSError as error:
        raise ConfigError(f"File {shown} cannot be read ({error.strerror}); check permissions.") from error


@contextmanager
def path_errors() -> Iterator[None]:
    """Turn errors of looking for files (a name too long, an unreadable directory) into `ConfigError`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"Path {error.filename} cannot be used ({error.strerror}); correct it.") from error


def find_yaml(name: str, directories: Sequence[Path]) -> Path | None:
    """Return the first file of that name (with or without suffix) on the search path, or None."""
    file = f"{name.removesuffix(SUFFIX)}{SUFFIX}"
    candidates = (absolute(directory / file) for directory in directories)
    return next((path for path in candidates if path.is_file()), None)


def names_in(directories: Sequence[Path]) -> list[str]:
    """Return the names of the configurations in the directories."""
    found = (path for directory in directories for path in directory.glob(f"*{SUFFIX}"))
    return sorted({path.stem for path in found if path.is_file()})


def search_directory(entry: Any) -> Path:
    """Return the directory that an entry of ``hydra.searchpath`` names.

    As in Hydra: ``file://`` or nothing before a path relative to the working directory, ``pkg://`` before a
    Python package. Raises `ConfigError` if there is no such directory.
    """
    stated = f"hydra.searchpath={shortened(entry)}"
    if not isinstance(entry, str):
        raise ConfigError(f"{stated} must be a list of directories such as [file://./configs].")
    scheme, _, rest = entry.rpartition("://")
    if scheme not in ("", "file", "pkg"):
        raise ConfigError(f"{stated} has an unknown scheme; write file://DIRECTORY or pkg://PACKAGE.")
    directory = _package_directory(rest) if scheme == "pkg" else Path(rest)
    if directory is None or not directory.is_dir():
        raise ConfigError(f"{stated} is no directory, seen from {Path.cwd()}; correct the path.")
    return absolute(directory)


def _package_directory(package: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(package.replace("/", "."))
    except (ImportError, ValueError):
        return None
    places = spec.submodule_search_locations if spec is not None else None
    return Path(places[0]) if places else None


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


def _written(node: yaml.Node | None, path: KeyPath) -> Iterator[tuple[KeyPath, Written]]:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        below = (*path, str(key.value))
        text = value.value if isinstance(value, yaml.ScalarNode) else None
        yield below, Written(key.start_mark.line + 1, text)
        yield from _written(value, below)
