"""Interpolations: the raw tree with every ``${...}`` replaced by what it stands for."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import (
    GrammarParseError,
    InterpolationKeyError,
    InterpolationToMissingValueError,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
)
from omegaconf.resolvers import oc

from regress.engine.config.nearest import nearest_keys
from regress.engine.config.origins import Origin
from regress.engine.config.text import shortened
from regress.errors import ConfigError

MISSING = "???"


class Resolver:
    """Looks values up in a tree of raw values; ``origin`` says who gave a path."""

    def __init__(self, tree: dict[str, Any], origin: Callable[[tuple[str, ...]], Origin]) -> None:
        self._tree = tree
        self._resolving = OmegaConf.create(tree)
        self._origin = origin

    def resolved(self, path: tuple[str, ...]) -> Any:
        """The value at ``path`` as plain data. Raises `ConfigError` if it, or what it refers to, is missing."""
        raw: Any = self._tree
        node: Any = self._resolving
        for name in path[:-1]:
            raw, node = raw[name], node._get_node(name)
        raw = raw[path[-1]]
        stated = f"{'.'.join(path)}={shortened(raw)} ({self._origin(path)})"
        if raw == MISSING:
            raise ConfigError(f"{stated} is mandatory and nobody gave it; set it in a file or on the command line.")
        try:
            value = node[path[-1]]
            return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except OmegaConfBaseException as error:
            raise ConfigError(f"{stated} {self._reason(error)}") from error

    def _reason(self, error: OmegaConfBaseException) -> str:
        message = str(error).splitlines()[0]
        quoted = message.partition("'")[2].rpartition("'")[0]
        if isinstance(error, InterpolationKeyError):
            known = _dotted(self._tree, "")
            return f"refers to {quoted}, which is no key; the nearest valid key is {' or '.join(nearest_keys(quoted, known))}."
        if isinstance(error, InterpolationToMissingValueError):
            missing = message.rpartition(": ")[2]
            return f"refers to {missing}, which is mandatory and nobody gave it; set {missing}."
        if isinstance(error, UnsupportedInterpolationType):
            return f"uses the resolver {message.rpartition(' ')[2]}, which does not exist; use oc.env, or a key."
        if isinstance(error, GrammarParseError):
            return f"is a malformed interpolation ({message}); write ${{key}} or ${{oc.env:NAME,default}}."
        if "Recursive interpolation" in message:
            return "refers to itself, directly or through other keys; break the circle."
        if "Environment variable" in message:
            return f"needs the environment variable {quoted}, which is not set; export it or give ${{oc.env:{quoted},default}}."
        return f"cannot be resolved ({message}); correct the interpolation."


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


def _dotted(tree: dict[str, Any], prefix: str) -> Iterator[str]:
    for name, value in tree.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _dotted(value, f"{prefix}{name}.")
