"""Raw values by option, merged layer by layer, and their interpolations in OmegaConf's grammar."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from itertools import count
from typing import Any, TypeVar, get_type_hints

from omegaconf._utils import split_key
from omegaconf.errors import GrammarParseError, OmegaConfBaseException
from omegaconf.grammar_parser import parse
from omegaconf.grammar_visitor import GrammarVisitor

from regress.engine.config.config_messages import DEFAULT, FILE, Origin, first_line, nearest_keys, shortened
from regress.engine.config.config_option import Entry, KeyPath, Option
from regress.engine.config.config_schema import find_option, options
from regress.errors import ConfigError

T = TypeVar("T")
MISSING = "???"
INTERPOLATIONS = "${KEY} or ${oc.env:NAME,DEFAULT}"
_hints = lru_cache(get_type_hints)
_parse = lru_cache(maxsize=512)(parse)


class UnresolvedError(Exception):
    """An interpolation that cannot be resolved; the text is the predicate of a sentence about the key."""


class MalformedError(UnresolvedError):
    """An interpolation outside the grammar."""


class Resolver:
    """Resolves interpolations; ``lookup`` gives the raw value of a path, and raises `KeyError` for one that is none."""

    def __init__(self, lookup: Callable[[KeyPath], Any], environ: Mapping[str, str]) -> None:
        self._lookup = lookup
        self._environ = environ

    def resolved(self, path: KeyPath, above: tuple[KeyPath, ...] = ()) -> Any:
        """Return the value at a path as plain data in containers of its own. Raises `UnresolvedError`."""
        if path in above:
            raise UnresolvedError("refers to itself, perhaps through other keys; break the circle")
        try:
            raw = self._lookup(path)
        except KeyError:
            key = ".".join(path)
            near = " or ".join(nearest_keys(key, options()))
            words = (
                f"refers to {key}, which is not a key of the configuration; the nearest valid key is {near}"
            )
            raise UnresolvedError(words) from None
        return self._plain(raw, path, (*above, path))

    def _plain(self, raw: Any, path: KeyPath, above: tuple[KeyPath, ...]) -> Any:
        if isinstance(raw, dict):
            return {name: self._plain(value, (*path, str(name)), above) for name, value in raw.items()}
        if isinstance(raw, list | tuple):
            return [self._plain(value, path, above) for value in raw]
        if raw == MISSING:
            raise UnresolvedError(f"needs {'.'.join(path)}, which is mandatory; give it a value")
        return self._text(raw, path, above) if isinstance(raw, str) and "${" in raw else raw

    def _text(self, text: str, path: KeyPath, above: tuple[KeyPath, ...]) -> Any:
        def key(name: str, memo: Any) -> Any:
            parts = split_key(name)
            dots = next((number for number, part in enumerate(parts) if part), len(parts))
            return self.resolved((*path[:-dots], *parts[dots:]) if dots else tuple(parts), above)

        def resolver(name: str, args: tuple[Any, ...], args_str: Any) -> Any:
            if name == "oc.decode" and args:
                return visitor.visit(parse(str(args[0]), "singleElement", "VALUE_MODE"))
            if name != "oc.env" or not 1 <= len(args) <= 2:
                raise UnresolvedError(f"uses the unknown resolver {name}; refer to a key or use oc.env")
            return self._variable(*args)

        visitor = GrammarVisitor(key, resolver, memo=None)
        try:
            return visitor.visit(_parse(text))
        except GrammarParseError as error:
            words = f"is a malformed interpolation ({first_line(error)}); write {INTERPOLATIONS}"
            raise MalformedError(words) from error
        except (OmegaConfBaseException, ValueError, TypeError) as error:
            raise UnresolvedError(f"cannot be resolved ({first_line(error)}); correct it") from error

    def _variable(self, name: str, *default: Any) -> str | None:
        if name in self._environ:
            return self._environ[name]
        if not default:
            raise UnresolvedError(
                f"needs the environment variable {name}, which is not set; set it or write ${{oc.env:{name},DEFAULT}}"
            )
        return None if default[0] is None else str(default[0])


class Values:
    """Explicitly given values; all others are the defaults of the schema.

    Free mappings merge entry by entry, as in Hydra, but the first entry given replaces the schema's default.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._given: dict[str, dict[KeyPath, Entry]] = {key: {} for key in options()}
        self._ages: dict[KeyPath, int] = {}
        self._numbers = count()
        self._resolver = Resolver(self._raw, environ)

    def put(self, entry: Entry) -> None:
        """Merge ``entry``: mappings merge, everything else replaces.

        Raises `ConfigError` for a path that the schema does not know, and for a section given a plain value.
        """
        path, value, origin, spelled = entry
        option = find_option(path, value, origin)
        if is_tree(value) and (option is None or option.kind is dict):
            for name, member in value.items():
                self.put(Entry((*path, name), member, origin))
        elif option is None:
            if value not in (None, {}) or (value is None and origin.layer != FILE):
                raise ConfigError(_not_a_section(entry))
            # null in a file: all lines of the section are commented out
        else:
            given = self._given[option.key]
            for other in [other for other in given if _same_branch(other, path)]:
                del given[other]
            if spelled is not None and isinstance(value, bool | int | float) and option.holds_text(path):
                value = spelled
            given[path] = Entry(path, value, origin)
            self._ages[path] = next(self._numbers)

    def remove(self, path: KeyPath) -> None:
        """Remove the values given at ``path`` and below it."""
        for given in self._given.values():
            for other in [other for other in given if other[: len(path)] == path]:
                del given[other]

    def origin(self, path: KeyPath) -> Origin:
        """Return the origin of the value at ``path``, an option or an entry of a free mapping."""
        keys = (".".join(path[:depth]) for depth in range(len(path), 0, -1))
        given: dict[KeyPath, Entry] = next((self._given[key] for key in keys if key in self._given), {})
        near = [entry.origin for other, entry in given.items() if _same_branch(other, path)]
        return near[-1] if near else Origin(DEFAULT)

    def age(self, path: KeyPath) -> int:
        """Return the place of an option's value in the order in which values were given; -1: it has its default."""
        return self._ages[path] if path in self._given[".".join(path)] else -1

    def origins(self) -> dict[str, Origin]:
        """Return the origin of each value by dotted key, the schema's defaults included."""
        paths = (path for key, given in self._given.items() for path in given or [options()[key].path])
        return {".".join(path): self.origin(path) for path in paths}

    def value(self, key: str) -> Any:
        """Return the resolved and checked value of an option. Raises `ConfigError`."""
        option = options()[key]
        raw = self._raw_of(option)
        try:
            if raw == MISSING:
                raise UnresolvedError("is mandatory; give it in a file or on the command line")
            plain = self._resolver.resolved(option.path)
        except UnresolvedError as error:
            stated = key if isinstance(error, MalformedError) else f"{key}={shortened(raw)}"
            raise ConfigError(f"{stated} ({self.origin(option.path)}) {error}.") from error
        return option.checked(plain, self.origin)

    def built(self, kind: type[T], prefix: str = "") -> T:
        """Return a section with its values, resolved and checked. Raises `ConfigError`."""
        found = {key: self.value(key) for key in options() if key.startswith(prefix)}
        made: T = _assembled(kind, prefix, found)
        return made

    def _raw_of(self, option: Option) -> Any:
        given = self._given[option.key]
        root: dict[str, Any] = {}
        for path, entry in given.items():
            if path == option.path:
                return entry.value
            node = root
            for name in path[len(option.path) : -1]:
                node = node.setdefault(name, {})
            node[path[-1]] = entry.value
        return root if given else option.default

    def _raw(self, path: KeyPath) -> Any:
        """Return the raw value at a path, that of a section as a mapping. Raises `KeyError`."""
        for depth in range(len(path), 0, -1):
            option = options().get(".".join(path[:depth]))
            if option is not None:
                value = self._raw_of(option)
                for name in path[depth:]:
                    value = value[int(name) if isinstance(value, list) else name]
                return value
        return dict(self._members(path))

    def _members(self, path: KeyPath) -> Iterator[tuple[str, Any]]:
        names = {one.path[len(path)] for one in options().values() if one.path[: len(path)] == path}
        if not names:
            raise KeyError(path)
        return ((name, self._raw((*path, name))) for name in names)


def _assembled(kind: Any, prefix: str, found: Mapping[str, Any]) -> Any:
    members = {}
    for spec in fields(kind):
        key, hint = f"{prefix}{spec.name}", _hints(kind)[spec.name]
        members[spec.name] = _assembled(hint, f"{key}.", found) if is_dataclass(hint) else found[key]
    try:
        return kind(**members)
    except ConfigError as error:  # of the objective, which checks itself
        refused = ConfigError(f"{prefix}{error}")
        for note in getattr(error, "__notes__", ()):
            refused.add_note(f"{prefix}{note}")
        raise refused from None


def is_tree(value: Any) -> bool:
    """Return True if a mapping merges entry by entry; an empty one, or one with other names than text, is one value."""
    return isinstance(value, dict) and bool(value) and all(isinstance(name, str) for name in value)


def _same_branch(a: KeyPath, b: KeyPath) -> bool:
    shared = min(len(a), len(b))
    return a[:shared] == b[:shared]


def _not_a_section(entry: Entry) -> str:
    key = ".".join(entry.path)
    inside = [name.removeprefix(f"{key}.") for name in options() if name.startswith(f"{key}.")]
    return (
        f"{key}={shortened(entry.value)} ({entry.origin}) must be a mapping with keys of "
        f"{', '.join(inside)}; to choose a file {key}/NAME.yaml, name one that is on the search path."
    )
