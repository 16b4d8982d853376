"""The schema as a table: every key that holds a value, with its type, default and rules."""

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
    """One key of the schema: ``kind`` is str, int, float, bool, list or dict; ``item`` the type of a member."""

    path: KeyPath
    kind: type
    item: Any
    optional: bool
    default: Any
    rules: Mapping[str, Any]

    @property
    def key(self) -> str:
        return ".".join(self.path)

    def member(self, path: KeyPath) -> "Leaf":
        """The entry of a free mapping as a leaf of its own."""
        return Leaf(path, self.item, None, False, None, {})


@cache
def leaves() -> Mapping[str, Leaf]:
    """Every leaf of `Config` by its dotted key, in the order of the schema."""
    return MappingProxyType({leaf.key: leaf for leaf in _walk(Config, ())})


@cache
def sections() -> frozenset[str]:
    """Dotted keys that hold further keys; the root is the empty string."""
    return frozenset(".".join(leaf.path[:depth]) for leaf in leaves().values() for depth in range(len(leaf.path)))


def find_leaf(path: KeyPath, value: Any, origin: Origin) -> Leaf | None:
    """The leaf that holds ``path`` (at it, or a free mapping above it); ``None`` for a section.

    Raises `ConfigError` with the nearest valid keys for a path outside the schema.
    """
    for depth in range(len(path), 0, -1):
        leaf = leaves().get(".".join(path[:depth]))
        if leaf is not None and (depth == len(path) or leaf.kind is dict):
            return leaf
    if ".".join(path) in sections():
        return None
    raise ConfigError(_unknown(path, value, origin))


def holds_text(leaf: Leaf | None) -> bool:
    """Whether values of the key (or of the free mapping) are text."""
    return leaf is not None and str in (leaf.kind, leaf.item)


def _unknown(path: KeyPath, value: Any, origin: Origin) -> str:
    key = ".".join(path)
    stated = f"{key}={shortened(value)} ({origin}) is no key of the configuration"
    if key in leaves():
        return f"{stated} because its dots are written within one name; nest it as sections."
    # a mapping was meant as a section, anything else as a value
    candidates = [name for name in sections() if name] if isinstance(value, dict) else []
    near = nearest_keys(key, [*leaves(), *sorted(candidates)])
    return f"{stated}; the nearest valid key is {' or '.join(near)}."


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
