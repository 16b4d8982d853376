"""Command-line overrides in Hydra's grammar: values, deletions, config group choices and the search path."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from regress.engine.config.leaves import KeyPath, find_leaf
from regress.engine.config.origins import COMMAND_LINE, Origin
from regress.engine.config.store import Entry, Store
from regress.engine.config.text import shortened
from regress.errors import ConfigError

SEARCHPATH = "hydra.searchpath"
ORIGIN = Origin(COMMAND_LINE)


@dataclass
class CommandLine:
    """Parsed overrides: choices of config groups (for Hydra) and of values (for the store)."""

    choices: list[Override] = field(default_factory=list)
    values: list[Override] = field(default_factory=list)

    def apply(self, store: Store) -> None:
        """Apply values to the store, in the order they were written."""
        for override in self.values:
            path = tuple(override.key_or_group.split("."))
            if override.is_delete():
                find_leaf(path, None, ORIGIN)
                store.remove(path)
            else:
                store.put(Entry(path, _value(override, path), ORIGIN))

    def keys(self) -> dict[KeyPath, Any]:
        """Return the values given on the command line by key."""
        paths = [(tuple(override.key_or_group.split(".")), override) for override in self.values]
        return {path: None if override.is_delete() else _value(override, path) for path, override in paths}


def parse_overrides(lines: Sequence[str], is_group: Callable[[str], bool]) -> CommandLine:
    """Sort overrides by what they change; ``is_group`` tells whether a config group of that name exists.

    Raises `ConfigError` for anything outside the grammar, for sweeps, and for Hydra's own settings.
    """
    parsed = CommandLine()
    for line in lines:
        override = _parse(line)
        if override.key_or_group == SEARCHPATH:
            continue
        if override.is_hydra_override():
            raise ConfigError(
                f"Override {shortened(line)} (command line) is a setting of Hydra, of which only "
                f"{SEARCHPATH} is used; remove it."
            )
        chooses = override.is_delete() or isinstance(override.value(), str | list)
        chooses = chooses and is_group(override.key_or_group)
        (parsed.choices if chooses else parsed.values).append(override)
    return parsed


def searchpath_override(lines: Sequence[str]) -> Any:
    """Return the value of ``hydra.searchpath=[...]`` among the overrides, or None."""
    parsed = (_parse(line) for line in lines if SEARCHPATH in line)
    given = [override for override in parsed if override.key_or_group == SEARCHPATH]
    return given[-1].value() if given else None


def _parse(line: str) -> Override:
    try:
        override = OverridesParser.create().parse_override(line)
        if not override.key_or_group:
            raise HydraException(f"no key in {line}")
    except (HydraException, ValueError) as error:
        raise ConfigError(
            f"Override {shortened(line)} (command line) is malformed; write KEY=VALUE, KEY=[A,B], GROUP=NAME "
            "or ~KEY, and a value with special characters as KEY='\"VALUE\"'."
        ) from error
    if override.is_sweep_override():
        raise ConfigError(
            f"Override {shortened(line)} (command line) gives several values to sweep over, and a run takes "
            "one; write a list as KEY=[A,B], and text with commas as KEY='\"A,B\"'."
        )
    return override


def _value(override: Override, path: KeyPath) -> Any:
    """Return the parsed value; for a key that holds text, numbers and booleans exactly as they were typed."""
    value = override.value()
    leaf = find_leaf(path, value, ORIGIN)
    if isinstance(value, bool | int | float) and leaf is not None and leaf.holds_text(path):
        return override.get_value_string()
    return value
