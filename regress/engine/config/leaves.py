"""Schema as a table: every key that holds a value, with its type, default and rules."""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from types import MappingProxyType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from regress.engine.config.nearest import nearest_keys
from regress.engine.config.origins import Origin
from regress.engine.config.schema import Config
from regress.engine.config.text import shortened
from regress.errors import ConfigError

KeyPath = tuple[str, ...]


@dataclass(frozen=True)
class Leaf:
    """One key of the schema.

    ``kind`` is ``str``, ``int``, ``float``, ``bool``, ``list``, ``dict`` (a free mapping) or ``Any``;
    ``item`` the kind of the members of a list or mapping; ``rules`` the metadata of the field.
    """

    path: KeyPath
    kind: Any
    item: Any
    optional: bool
    default: Any
    rules: Mapping[str, Any]

    @property
    def key(self) -> str:
        return ".".join(self.path)

    def member(self, name: str) -> "Leaf":
        """Return an entry of a free mapping as a leaf of its own."""
        return Leaf((*self.path, name), self.item, None, False, None, {})

    def holds_text(self, path: KeyPath) -> bool:
        """Return True if the value at ``path``, the leaf or an entry of it, is text."""
        return (self.kind if path == self.path else self.item) is str


@cache
def leaves() -> Mapping[str, Leaf]:
    """Return every leaf of `Config` by its dotted key, in the order of the schema."""
    return MappingProxyType({leaf.key: leaf for leaf in _walk(Config, ())})


@cache
def sections() -> tuple[str, ...]:
    """Return the dotted keys that hold further keys."""
    above = [".".join(leaf.path[:depth]) for leaf in leaves().values() for depth in range(1, len(leaf.path))]
    return tuple(dict.fromkeys(above))


def find_leaf(path: KeyPath, value: Any, origin: Origin) -> Leaf | None:
    """Return the leaf that holds ``path`` (at it, or a free mapping above it); ``None`` for a section.

    Raises `ConfigError` with the nearest valid keys for a path outside the schema.
    """
    for depth in range(len(path), 0, -1):
        leaf = leaves().get(".".join(path[:depth]))
        if leaf is not None and path[:depth] == leaf.path and (depth == len(path) or leaf.kind is dict):
            return leaf
    if ".".join(path) in sections():
        return None
    raise ConfigError(_unknown(path, value, origin))


def _unknown(path: KeyPath, value: Any, origin: Origin) -> str:
    key = ".".join(path)
    stated = f"{shortened(key)}={shortened(value)} ({origin}) is no key of the configuration"
    if key in leaves():
        return f"{stated} when its dots are part of one name; nest it, one level for each dot."
    # a mapping was meant as a section, anything else as a value
    candidates = sections() if isinstance(value, dict) else ()
    return f"{stated}; the nearest valid key is {' or '.join(nearest_keys(key, [*leaves(), *candidates]))}."


def _walk(kind: type, prefix: KeyPath) -> Iterator[Leaf]:
    hints = get_type_hints(kind)
    for spec in fields(kind):
        path = (*prefix, spec.name)
        if is_dataclass(hints[spec.name]):
            yield from _walk(hints[spec.name], path)
        else:
            yield _leaf(path, hints[spec.name], spec)


def _leaf(path: KeyPath, hint: Any, spec: "Field[Any]") -> Leaf:
    optional = isinstance(hint, UnionType)
    if optional:
        hint = get_args(hint)[0]
    kind, members = get_origin(hint) or hint, get_args(hint)
    default = spec.default if spec.default_factory is MISSING else spec.default_factory()
    return Leaf(path, kind, members[-1] if members else None, optional, default, spec.metadata)
