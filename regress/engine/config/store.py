"""Raw values by path, merged layer by layer; the later layer wins."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from regress.engine.config.leaves import KeyPath, find_leaf, leaves
from regress.engine.config.origins import DEFAULT, FILE, Origin
from regress.engine.config.text import shortened
from regress.errors import ConfigError


class Entry(NamedTuple):
    """A value (perhaps an interpolation, perhaps a mapping) that a layer gives to a path."""

    path: KeyPath
    value: Any
    origin: Origin


class Store:
    """Explicitly given values, flat; all others come from the schema.

    Free mappings merge entry by entry, as in Hydra, but the first entry given replaces the schema's default.
    """

    def __init__(self) -> None:
        self._entries: dict[KeyPath, Entry] = {}
        self._below: dict[KeyPath, list[Entry]] | None = None

    def put(self, entry: Entry) -> None:
        """Merge ``entry`` into the store: mappings merge, everything else replaces.

        Raises `ConfigError` for a path that the schema does not know, and for a section given a plain value.
        """
        leaf = find_leaf(entry.path, entry.value, entry.origin)
        if leaf is None:
            self._put_section(entry)
        elif leaf.kind is dict and is_tree(entry.value):
            self._put_members(entry)
        else:
            self._replace(entry)

    def remove(self, path: KeyPath) -> None:
        """Remove the values given at ``path`` and below it."""
        self._below = None
        for given in [given for given in self._entries if given[: len(path)] == path]:
            del self._entries[given]

    def origin(self, path: KeyPath) -> Origin:
        """Return the origin of the value at ``path``: the last value at or below it, or the one that
        contains it.
        """
        given = self._given(path)
        if given:
            return given[-1].origin
        above = (self._entries.get(path[:depth]) for depth in range(len(path)))
        return next((entry.origin for entry in above if entry is not None), Origin(DEFAULT))

    def age(self, path: KeyPath) -> int:
        """Return the place of a key's value in the order in which values were given; -1: it has its default."""
        given = self._entries.get(path)
        return -1 if given is None else list(self._entries).index(path)

    def origins(self) -> dict[str, Origin]:
        """Return the origin of each value by dotted key, the schema's defaults included."""
        return {".".join(path): self.origin(path) for path, _ in self._values()}

    def tree(self) -> dict[str, Any]:
        """Return all values nested, the schema's defaults included."""
        root: dict[str, Any] = {}
        for path, value in self._values():
            node = root
            for name in path[:-1]:
                node = node.setdefault(name, {})
            node[path[-1]] = value
        return root

    def _values(self) -> Iterator[tuple[KeyPath, Any]]:
        for leaf in leaves().values():
            given = self._given(leaf.path)
            if not given:
                yield leaf.path, leaf.default
            for entry in given:
                yield entry.path, entry.value

    def _given(self, path: KeyPath) -> list[Entry]:
        """Return the values given at a path and below it; no value is both below it and within another."""
        if self._below is None:
            self._below = {}
            for key, entry in self._entries.items():
                for depth in range(len(key) + 1):
                    self._below.setdefault(key[:depth], []).append(entry)
        return self._below.get(path, [])

    def _put_section(self, entry: Entry) -> None:
        if isinstance(entry.value, dict):
            self._put_members(entry)
        elif entry.value is not None or entry.origin.layer != FILE:
            raise ConfigError(_not_a_section(entry))
        # null in a file: all lines of the section are commented out

    def _put_members(self, entry: Entry) -> None:
        for name, value in entry.value.items():
            self.put(Entry((*entry.path, str(name)), value, entry.origin))

    def _replace(self, entry: Entry) -> None:
        self._below = None
        for given in [given for given in self._entries if _same_branch(given, entry.path)]:
            del self._entries[given]
        self._entries[entry.path] = entry


def is_tree(value: Any) -> bool:
    """Return True if a mapping merges entry by entry; an empty one, or one with names that are not text, is
    one value.
    """
    return isinstance(value, dict) and bool(value) and all(isinstance(name, str) for name in value)


def _same_branch(a: KeyPath, b: KeyPath) -> bool:
    shared = min(len(a), len(b))
    return a[:shared] == b[:shared]


def _not_a_section(entry: Entry) -> str:
    key = ".".join(entry.path)
    inside = [name.removeprefix(f"{key}.") for name in leaves() if name.startswith(f"{key}.")]
    return (
        f"{key}={shortened(entry.value)} ({entry.origin}) must be a mapping with keys of "
        f"{', '.join(inside)}; to choose a file {key}/NAME.yaml, name one that is on the search path."
    )
