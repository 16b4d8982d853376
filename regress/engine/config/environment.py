"""Environment layer: ``REGRESS_OPTIMIZER__LEARNING_RATE=1e-3`` sets ``optimizer.learning_rate``.

Section and key are joined by two underscores, in capitals or not. Values are YAML (``[0.9, 0.95]``,
``null``, ``true``), except for keys that hold text, which take them as they are. Below a free mapping
names become lower case (``REGRESS_MODEL__CONFIG__HIDDEN_SIZE``), except below ``system_envs``.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf

from regress.engine.config.files import UNREADABLE
from regress.engine.config.leaves import KeyPath, Leaf, find_leaf
from regress.engine.config.origins import COMMAND_LINE, ENVIRONMENT, Origin
from regress.engine.config.store import Entry, Store
from regress.engine.config.text import shortened
from regress.errors import ConfigError

PREFIX = "REGRESS_"
SEPARATOR = "__"
VERBATIM = "system_envs"


def apply_environment(environ: Mapping[str, str], store: Store) -> None:
    """Apply the variables to the store, except where the command line chose a config group."""
    for entry in environment_entries(environ):
        if store.origin(entry.path).layer != COMMAND_LINE:
            store.put(entry)


def environment_entries(environ: Mapping[str, str]) -> Iterator[Entry]:
    """Yield the variables with our prefix, by name. Raises `ConfigError` for one that names no key."""
    for variable in sorted(environ):
        if variable.upper().startswith(PREFIX):
            yield entry_of(variable_path(variable), environ[variable], Origin(ENVIRONMENT, variable))


def entry_of(path: KeyPath, text: str, origin: Origin) -> Entry:
    """Return what a text gives to a key: YAML, except for keys that hold text. Raises `ConfigError` if it is none."""
    leaf = find_leaf(path, text, origin)
    return Entry(path, text if leaf is None else _value(leaf, path, text, origin), origin)


def variable_path(variable: str) -> KeyPath:
    """Return the key that a variable names."""
    first, *rest = variable[len(PREFIX) :].split(SEPARATOR)
    if first.lower() == VERBATIM:
        return (VERBATIM, *rest)
    return (first.lower(), *(name.lower() for name in rest))


def _value(leaf: Leaf, path: KeyPath, text: str, origin: Origin) -> Any:
    if leaf.optional and text == "null":
        return None
    if leaf.holds_text(path) or "${" in text:
        return text
    try:
        # a scalar in OmegaConf's YAML, where 1e-3 is a number
        parsed: Any = OmegaConf.to_container(OmegaConf.create(f"value: {text}"), resolve=False)
    except UNREADABLE as error:
        raise ConfigError(
            f"{'.'.join(path)}={shortened(text)} ({origin}) is no valid YAML; quote it."
        ) from error
    return parsed["value"]
