"""File layer: composes the files of a configuration by Hydra's defaults lists."""

import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.default_element import ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.errors import MissingConfigException
from hydra.types import RunMode

from regress.engine.config.files import YamlFile
from regress.engine.config.inheritance import Inheritance
from regress.engine.config.leaves import KeyPath, find_leaf, leaves
from regress.engine.config.origins import COMMAND_LINE, FILE, Origin, shown_path
from regress.engine.config.primary import Primary, missing_file
from regress.engine.config.store import Entry, Store, is_tree
from regress.engine.config.text import first_line, shortened
from regress.errors import ConfigError

HYDRA_KEYS = ("defaults", "hydra")
"""Top-level keys of a file that control composition."""


class FileLayer:
    """All files that a primary file and the chosen config groups bring in."""

    def __init__(self, primary: Primary) -> None:
        self._name = primary.file.path.stem if primary.file is not None else None
        self._shown = shown_path(primary.file.path) if primary.file is not None else COMMAND_LINE
        self._directories = primary.directories
        self._is_alone = primary.file is not None and _is_alone(primary.file)
        self._inheritance = Inheritance(primary.directories, primary.file)

    def is_group(self, name: str) -> bool:
        """Return True if overriding ``name`` chooses a file: a directory of that name is on the search path
        and no key has it.
        """
        return name not in leaves() and any((directory / name).is_dir() for directory in self._directories)

    def apply(self, choices: Sequence[Override], store: Store) -> None:
        """Apply the files to the store in the order of the defaults lists. Raises `ConfigError`."""
        self._inheritance.follow([self._name] if self._name is not None else [])
        self._inheritance.follow(map(_chosen_name, choices))
        if self._name is None and not choices:
            return
        chosen = {choice.key_or_group: str(choice.input_line) for choice in choices}
        for default in self._defaults(choices):
            for entry in self._entries(default, chosen):
                store.put(entry)

    def _defaults(self, choices: Sequence[Override]) -> list[ResultDefault]:
        """Return the flat list that Hydra makes of all defaults lists."""
        if not choices and self._is_alone:
            return [ResultDefault(config_path=self._name, package="", is_self=True, primary=True)]
        further = json.dumps([f"file://{directory}" for directory in self._directories[1:]])
        lines = [f"hydra.searchpath={further}"]
        with self._errors(choices), _loader(self._directories[0]) as loader:
            lists = loader.compute_defaults_list(self._name, lines, RunMode.RUN)
            if choices:
                lines += [_choice(override, lists.overrides.known_choices) for override in choices]
                lists = loader.compute_defaults_list(self._name, lines, RunMode.RUN)
        return [default for default in lists.defaults if _is_ours(default)]

    def _entries(self, default: ResultDefault, chosen: Mapping[str, str]) -> Iterator[Entry]:
        file = self._inheritance.file(str(default.config_path))
        assert file is not None  # Hydra has just read it from there
        package = tuple(default.package.split(".")) if default.package else ()
        override = chosen.get(str(default.override_key).partition("@")[0])
        for key, value in _values(file.values):
            origin = Origin(FILE, file.where(key))
            if override is not None:
                origin = Origin(COMMAND_LINE, f"{override} ({file.where(key)})")
            yield _entry(file, key, Entry((*package, *key), value, origin))

    @contextmanager
    def _errors(self, choices: Sequence[Override]) -> Iterator[None]:
        """Turn errors of composition into `ConfigError`, and suppress Hydra's warnings."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # without _self_ a file comes after its defaults list
                yield
        except MissingConfigException as error:
            raise ConfigError(self._missing(error, choices)) from error
        except ConfigError:
            raise
        except Exception as error:  # a defaults list can make Hydra raise nearly anything
            raise ConfigError(
                f"The defaults lists of {self._shown} cannot be composed ({first_line(error)}); correct them."
            ) from error

    def _missing(self, error: MissingConfigException, choices: Sequence[Override]) -> str:
        name, parent = str(error.missing_cfg_file), re.match("In '([^']*)'", str(error))
        file = self._inheritance.file(parent[1]) if parent is not None else None
        where = f"file {file.where(('defaults',))}" if file is not None else self._shown
        if name in map(_chosen_name, choices):
            where = COMMAND_LINE
        return f"{shortened(name)} ({where}) is no configuration: {missing_file(name, self._directories)}."


@contextmanager
def _loader(directory: Path) -> Iterator[ConfigLoader]:
    """Provide Hydra's loader for a directory, even if this process already runs under Hydra."""
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(directory), job_name="regress", version_base=None):
            yield GlobalHydra.instance().config_loader()
    finally:
        GlobalHydra.instance().hydra = outer


def _choice(override: Override, known: Mapping[str, str | None]) -> str:
    """Return the line that makes Hydra accept the choice, whether or not a defaults list names the group."""
    line = str(override.input_line).lstrip("+")
    is_known = override.get_key_element().lstrip("+~") in known
    if override.is_delete() and not is_known:
        raise ConfigError(f"Override {line} (command line) deletes a group that is not chosen; remove it.")
    return line if is_known else f"+{line}"


def _chosen_name(choice: Override) -> str:
    return f"{choice.key_or_group}/{choice.value()}"


def _is_alone(file: YamlFile) -> bool:
    """Return True for a file without a defaults list and a header: most are, and Hydra takes long to say so."""
    return "defaults" not in file.values and "@package" not in file.path.read_text(encoding="utf-8")


def _is_ours(default: ResultDefault) -> bool:
    path = default.config_path
    return path is not None and path.partition("/")[0] not in ("hydra", "_dummy_empty_config_")


def _values(mapping: Mapping[str, Any], path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    for name, value in mapping.items():
        if not path and name in HYDRA_KEYS:
            continue
        if is_tree(value):
            yield from _values(value, (*path, str(name)))
        else:
            yield (*path, str(name)), value


def _entry(file: YamlFile, key: KeyPath, entry: Entry) -> Entry:
    """Return the entry with text, numbers and booleans spelled as in the file, if its path holds text."""
    leaf = find_leaf(*entry)
    if isinstance(entry.value, bool | int | float) and leaf is not None and leaf.holds_text(entry.path):
        return entry._replace(value=file.written[key].text if key in file.written else entry.value)
    return entry
