"""YAML files of the configuration: reading one, and finding them on the search path."""

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from regress.engine.config.nearest import nearest
from regress.engine.config.origins import shown_path
from regress.errors import ConfigError

SUFFIX = ".yaml"
BUILT_IN = Path(__file__).parent / "conf"


@dataclass(frozen=True)
class Written:
    """Where and how a key is written: its line (from 1), and the source text of a scalar value."""

    line: int
    text: str | None


@dataclass(frozen=True)
class YamlFile:
    """The keys of one file, interpolations unresolved, and where each is written."""

    path: Path
    values: dict[str, Any]
    written: Mapping[tuple[str, ...], Written]

    def where(self, key: tuple[str, ...]) -> str:
        """``path:line`` of a key, or of the nearest key above it."""
        for depth in range(len(key), 0, -1):
            if key[:depth] in self.written:
                return f"{shown_path(self.path)}:{self.written[key[:depth]].line}"
        return shown_path(self.path)


def read_yaml(path: Path) -> YamlFile:
    """Raises `ConfigError` naming file, line and remedy if it is not a UTF-8 file with one YAML mapping."""
    with file_errors(path):
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None and not isinstance(node, yaml.MappingNode):
            where = f"{shown_path(path)}:{node.start_mark.line + 1}"
            raise ConfigError(f"File {where} must hold a mapping of keys to values; write KEY: VALUE lines.")
        values: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    return YamlFile(path, values, dict(_written(node, ())) if node is not None else {})


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Turn what reading ``path`` (or a file it inherits from) can raise into `ConfigError`."""
    try:
        yield
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{shown_path(Path(mark.name) if mark and Path(mark.name).is_file() else path)}"
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"File {where}{line} is no valid YAML ({error.problem}); correct that line.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"File {shown_path(path)} is no valid YAML; it holds control characters.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"File {shown_path(path)} is not UTF-8 text (byte {error.start}); save it as UTF-8.") from error
    except OSError as error:
        named = Path(error.filename) if isinstance(error.filename, str) else path
        raise ConfigError(f"File {shown_path(named)} cannot be read ({error.strerror}); check path and rights.") from error


def find_yaml(name: str, directories: list[Path]) -> Path | None:
    """The first file of that name (without or with suffix) on the search path."""
    for directory in directories:
        path = directory / with_suffix(name)
        if path.is_file():
            return path
    return None


def missing_yaml(name: str, directories: list[Path]) -> str:
    """Why `find_yaml` found nothing, with the nearest name there is."""
    stems = sorted({path.stem for directory in directories for path in directory.glob(f"*{SUFFIX}")})
    searched = ", ".join(shown_path(directory) for directory in directories)
    return f"Configuration {name} is in none of the directories {searched}; the nearest name is {nearest(name, stems)}."


def with_suffix(name: str) -> str:
    return name if name.endswith(SUFFIX) else name + SUFFIX


def search_directory(entry: Any) -> Path:
    """The directory that an entry of ``hydra.searchpath`` means: ``file://`` (from here), ``pkg://`` or plain."""
    if not isinstance(entry, str):
        raise ConfigError(f"hydra.searchpath={entry} must be a list of directories such as file://./configs.")
    scheme, _, rest = entry.rpartition("://")
    if scheme not in ("", "file", "pkg"):
        raise ConfigError(f"hydra.searchpath={entry} has an unknown scheme; use file://DIRECTORY or pkg://PACKAGE.")
    directory = _package_directory(rest) if scheme == "pkg" else Path(rest)
    if directory is None or not directory.is_dir():
        raise ConfigError(
            f"hydra.searchpath={entry} is no directory, seen from {Path.cwd()}; correct it or start from elsewhere."
        )
    return directory


def _package_directory(package: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(package.replace("/", "."))
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    return Path(places[0]) if places else None


def _written(node: yaml.Node, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Written]]:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        below = (*path, str(key.value))
        text = value.value if isinstance(value, yaml.ScalarNode) else None
        yield below, Written(key.start_mark.line + 1, text)
        yield from _written(value, below)
