"""Raw values by path while layers are laid over each other; the later layer wins."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from regress.engine.config.leaves import KeyPath, find_leaf, leaves
from regress.engine.config.origins import DEFAULT, Origin
from regress.engine.config.text import shortened
from regress.errors import ConfigError


class Entry(NamedTuple):
    """A value (perhaps an interpolation, perhaps a mapping) that a layer gives to a path."""

    path: KeyPath
    value: Any
    origin: Origin


class Store:
    """Explicitly given values; what nobody gives comes from the schema."""

    def __init__(self) -> None:
        self._entries: dict[KeyPath, Entry] = {}

    def put(self, entry: Entry) -> None:
        """Lay ``entry`` over what is there: mappings merge, everything else replaces.

        Raises `ConfigError` for a path that the schema does not know.
        """
        leaf = find_leaf(entry.path, entry.value, entry.origin) if entry.path else None
        if leaf is None:
            self._put_section(entry)
        elif _is_mapping(entry.value) and leaf.kind is dict:
            for key, value in entry.value.items():
                self.put(Entry((*entry.path, key), value, entry.origin))
        else:
            self._replace(entry)

    def remove(self, path: KeyPath) -> None:
        """Forget what was given at ``path`` and below it."""
        for given in [given for given in self._entries if given[: len(path)] == path]:
            del self._entries[given]

    def origin(self, path: KeyPath) -> Origin:
        """Who gave the value at ``path``, or the last value below it."""
        below = [entry.origin for given, entry in self._entries.items() if given[: len(path)] == path]
        return below[-1] if below else Origin(DEFAULT)

    def origins(self) -> dict[str, Origin]:
        """Who gave each value, by dotted key, the schema's defaults included."""
        return {".".join(path): self.origin(path) for path, _ in self._values()}

    def tree(self) -> dict[str, Any]:
        """All values nested, the schema's defaults included."""
        root: dict[str, Any] = {}
        for path, value in self._values():
            node = root
            for name in path[:-1]:
                node = node.setdefault(name, {})
            node[path[-1]] = value
        return root

    def _values(self) -> Iterator[tuple[KeyPath, Any]]:
        for leaf in leaves().values():
            given = [entry for path, entry in self._entries.items() if path[: len(leaf.path)] == leaf.path]
            if not given:
                yield leaf.path, leaf.default
            for entry in given:
                yield entry.path, entry.value

    def _put_section(self, entry: Entry) -> None:
        if entry.value is None:
            return  # a section whose lines are all commented out
        if not isinstance(entry.value, dict):
            raise ConfigError(_not_a_section(entry))
        for key, value in entry.value.items():
            self.put(Entry((*entry.path, str(key)), value, entry.origin))

    def _replace(self, entry: Entry) -> None:
        self.remove(entry.path)
        for depth in range(1, len(entry.path)):
            self._entries.pop(entry.path[:depth], None)
        self._entries[entry.path] = entry


def _is_mapping(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(isinstance(key, str) for key in value)


def _not_a_section(entry: Entry) -> str:
    key = ".".join(entry.path)
    inside = [name.removeprefix(f"{key}.") for name in leaves() if name.startswith(f"{key}.")]
    return (
        f"{key}={shortened(entry.value)} ({entry.origin}) must be a mapping, or the name of a file {key}/NAME.yaml "
        f"chosen in a defaults list or on the command line; its keys are {', '.join(inside)}."
    )
