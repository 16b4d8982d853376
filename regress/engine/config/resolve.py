"""Interpolations: raw values with every ``${...}`` replaced by the value it refers to."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    GrammarParseError,
    InterpolationKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
)
from omegaconf.resolvers import oc

from regress.engine.config.files import INTERPOLATIONS
from regress.engine.config.leaves import KeyPath, leaves
from regress.engine.config.nearest import nearest_keys
from regress.engine.config.origins import Origin
from regress.engine.config.text import first_line, shortened
from regress.errors import ConfigError

MISSING = "???"
_KEY = re.compile(r"\$\{([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\}", re.ASCII)
_VARIABLE = re.compile(r"\$\{oc\.env:[^${}]*\}")


class Resolver:
    """Looks up values in a tree of raw values; ``origin`` returns the origin of a path."""

    def __init__(self, tree: dict[str, Any], origin: Callable[[KeyPath], Origin]) -> None:
        self._raw = tree
        self._origin = origin

    @cached_property
    def _tree(self) -> DictConfig:
        """All values as OmegaConf sees them; making it takes longer than most configurations need altogether."""
        try:
            return OmegaConf.create(self._raw)
        except GrammarParseError as error:
            raise ConfigError(self._malformed(error)) from error

    def resolved(self, path: KeyPath) -> Any:
        """Return the value at ``path`` as plain data. Raises `ConfigError` if it refers to a missing value."""
        raw: Any = self._raw
        for name in path:
            raw = raw[name]
        plain = self._referred(raw)
        if _is_plain(plain):
            return _copied(plain)
        stated = f"{'.'.join(path)}={shortened(raw)} ({self._origin(path)})"
        if raw == MISSING:
            raise ConfigError(f"{stated} is mandatory; give it in a file or on the command line.")
        node: Any = self._part(path) or self._tree
        for name in path[:-1]:
            node = node[name]
        try:
            value = node[path[-1]]
            if OmegaConf.is_config(value):
                return OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{stated} {why_unresolved(error)}.") from error
        return value

    def _part(self, path: KeyPath) -> DictConfig | None:
        """Return a tree of one text and all that it refers to, if that is variables, texts and plain values."""
        tree: dict[str, Any] = {}
        keys = [path]
        for key in keys:  # grows
            value = self._raw_value(key)
            if isinstance(value, str):
                if "$" in _VARIABLE.sub("", _KEY.sub("", value)) or value == MISSING:
                    return None
                named = (tuple(name.split(".")) for name in _KEY.findall(value))
                keys += [each for each in named if each not in keys]
            elif not isinstance(value, bool | int | float):
                return None
            part = tree
            for name in key[:-1]:
                part = part.setdefault(name, {})
            part[key[-1]] = value
        try:
            return OmegaConf.create(tree)
        except GrammarParseError:  # told of the whole tree, with its place
            return None

    def _raw_value(self, key: KeyPath) -> Any:
        """Return the raw value of a key, None if there is none."""
        value: Any = self._raw
        for name in key:
            if not isinstance(value, dict) or name not in value:
                return None
            value = value[name]
        return value

    def _referred(self, raw: Any) -> Any:
        """Return the plain value of a key that a raw value names and nothing else; any other value as it is."""
        found = _KEY.fullmatch(raw) if isinstance(raw, str) else None
        value = None if found is None else self._raw_value(tuple(found[1].split(".")))
        return value if value is not None and _is_plain(value) else raw

    def _malformed(self, error: GrammarParseError) -> str:
        key = str(error.full_key)
        origin = self._origin(tuple(key.split(".")))
        return f"{key} ({origin}) is a malformed interpolation ({first_line(error)}); write {INTERPOLATIONS}."


def _is_plain(raw: Any) -> bool:
    """Return True if nothing in a raw value has to be resolved or found missing."""
    if isinstance(raw, str):
        return "${" not in raw and raw != MISSING
    if isinstance(raw, dict):
        return all(isinstance(name, str) and _is_plain(value) for name, value in raw.items())
    if isinstance(raw, list | tuple):
        return all(map(_is_plain, raw))
    return raw is None or isinstance(raw, bool | int | float)


def _copied(raw: Any) -> Any:
    """Return a plain value in containers of its own, with lists for tuples, as OmegaConf would."""
    if isinstance(raw, dict):
        return {name: _copied(value) for name, value in raw.items()}
    return [_copied(value) for value in raw] if isinstance(raw, list | tuple) else raw


@contextmanager
def environment(environ: Mapping[str, str]) -> Iterator[None]:
    """Let ``${oc.env:NAME}`` read ``environ`` instead of the environment of the process."""

    def lookup(name: str, *default: Any) -> str | None:
        if name in environ:
            return environ[name]
        if not default:
            raise KeyError(f"Environment variable '{name}' not found")
        return None if default[0] is None else str(default[0])

    OmegaConf.register_new_resolver("oc.env", lookup, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def why_unresolved(error: OmegaConfBaseException) -> str:
    """Describe the error of an interpolation and its remedy, as the predicate of a sentence about the key."""
    message = first_line(error)
    quoted = message.partition("'")[2].rpartition("'")[0]
    if isinstance(error, InterpolationKeyError):
        near = " or ".join(nearest_keys(quoted, leaves()))
        return f"refers to {quoted}, which is no key of the configuration; the nearest valid key is {near}"
    if isinstance(error, UnsupportedInterpolationType):
        return f"uses the unknown resolver {message.rpartition(' ')[2]}; refer to a key or use oc.env"
    if "Missing mandatory value" in message:
        missing = error.full_key if isinstance(error, MissingMandatoryValue) else message.rpartition(": ")[2]
        return f"needs {missing}, which is mandatory; give it a value"
    if "Recursive interpolation" in message:
        return "refers to itself, perhaps through other keys; break the circle"
    if "Environment variable" in message:
        return (
            f"needs the environment variable {quoted}, which is not set; "
            f"set it or write ${{oc.env:{quoted},DEFAULT}}"
        )
    return f"cannot be resolved ({message}); correct the interpolation"
