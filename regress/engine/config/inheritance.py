"""Inherited configuration files, all of them read and checked before Hydra sees them.

Hydra's errors say little about a broken file, and do not name an inherited one. Defaults lists are followed
here only where they name files plainly; their interpretation is left to Hydra.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from regress.engine.config.files import YamlFile, find_yaml, read_yaml
from regress.engine.config.origins import shown_path
from regress.errors import ConfigError


class Inheritance:
    """Files by path, each read once."""

    def __init__(self, directories: Sequence[Path], primary: YamlFile | None = None) -> None:
        self._directories = directories
        self._files = {primary.path: primary} if primary is not None else {}

    def file(self, name: str) -> YamlFile | None:
        """Return the file of that name (``group/option``) on the search path, or None."""
        path = find_yaml(name, self._directories)
        if path is None:
            return None
        if path not in self._files:
            self._files[path] = read_yaml(path)
        return self._files[path]

    def follow(self, names: Iterable[str], heirs: tuple[Path, ...] = ()) -> None:
        """Read the files of these names and all that they inherit from.

        Raises `ConfigError` for a file that cannot be read, and for one that inherits from itself.
        """
        for name in names:
            file = self.file(name)
            if file is None:
                continue  # Hydra decides whether that is an error
            if file.path in heirs:
                circle = (*heirs[heirs.index(file.path) :], file.path)
                raise ConfigError(
                    f"Files inherit in a circle, {' -> '.join(map(shown_path, circle))}; "
                    "take one of them out of a defaults list."
                )
            self.follow(_inherited(file, name.rpartition("/")[0]), (*heirs, file.path))


def _inherited(file: YamlFile, group: str) -> Iterator[str]:
    entries = file.values.get("defaults")
    for entry in entries if isinstance(entries, list) else ():
        for name in _names(entry):
            if name.startswith("/"):
                yield name[1:]
            elif name != "_self_":
                yield f"{group}/{name}" if group else name


def _names(entry: Any) -> Iterator[str]:
    """Yield ``base`` for base and ``model/llama`` for ``model: llama``; packages and keywords are dropped."""
    if isinstance(entry, str):
        yield entry.partition("@")[0]
    for key, options in entry.items() if isinstance(entry, dict) else ():
        group = str(key).rpartition(" ")[2].partition("@")[0]
        for option in options if isinstance(options, list) else [options]:
            yield f"{group}/{option}"
